"""Starts the parts of the self-test in a process of their own, watches it, and reports.

This process never touches the GPU. A part that hangs is killed when its time is up, one that
crashes takes its process with it; either is a failure of that part, and the rest goes on in a new
process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax_w4a4
from jax_w4a4 import _ffi
from jax_w4a4.selftest import record

PASSED, FAILED, USAGE, NOTHING_TO_TEST = 0, 1, 2, 3
LIMIT_S = 300.0
# The package that runs here, not one in the working directory (-P).
COMMAND = (sys.executable, "-P", "-m", "jax_w4a4.selftest.parts")
_ROOT = str(pathlib.Path(jax_w4a4.__file__).resolve().parents[1])
_POLL_S = 0.05
_KILL_S = 10.0
_LOG_TAIL = 1500
# Killed parts after which the rest is not tried: a GPU that hangs costs the limit each time.
_MOST_KILLED = 2


class _Child:
    """One process that runs parts and writes a line of JSON before and after each."""

    def __init__(
        self, command: Sequence[str], names: Sequence[str], folder: pathlib.Path, checked: bool
    ):
        self.lines = folder / "lines"
        self.lines.write_text("")
        self.log = folder / "log"
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
        path = [_ROOT, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if checked:
            environment[_ffi.ENV_CHECKED] = "1"
        # Files, not pipes: nothing here ever waits for what a stuck process holds.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--out", str(self.lines), *names], stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._read = 0

    def new_lines(self) -> list[dict[str, Any]]:
        text = self.lines.read_text()
        end = text.rfind("\n") + 1
        fresh, self._read = text[self._read : end], end
        return [json.loads(line) for line in fresh.splitlines()]

    def kill(self) -> bool:
        """Ends the process and what it started; False if it does not go."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        try:
            self.process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-_LOG_TAIL:].strip()


def _ended(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit status {code}"


def _failed(name: str, seconds: float, why: str, log: str) -> dict[str, Any]:
    part: dict[str, Any] = {
        "part": name,
        "seconds": round(seconds, 2),
        "checks": 0,
        "kernel_calls": 0,
    }
    part |= {"failures": [why], "more_failures": 0, "facts": {}}
    return part | ({"log": log} if log else {})


def run(
    names: Sequence[str],
    *,
    command: Sequence[str] = COMMAND,
    limit_s: float = LIMIT_S,
    checked: bool = False,
    tell: Callable[[dict[str, Any]], None] = lambda part: None,
) -> list[dict[str, Any]] | str:
    """Runs parts in order, each within `limit_s` seconds.

    Args:
      command: starts a process that takes `--out FILE` and names of parts.
      checked: with the kernels whose waits end.
      tell: called with each part's result as it comes.

    Returns:
      A dict per part (part, seconds, checks, failures, more_failures, facts, log), or why there is
      nothing to test.
    """
    left, done, killed = list(names), [], 0
    waits: list[str] = []  # that kernels of this process gave up

    def finish(part: dict[str, Any]) -> None:
        left.remove(part["part"])
        if waits and part["failures"]:
            part["failures"] = [*waits, *part["failures"]]
        elif waits:
            part["facts"]["slow_waits"] = list(waits)
        waits.clear()
        done.append(part)
        tell(part)
        if part["part"] == "preflight" and part["failures"]:
            give_up("preflight failed")

    def give_up(why: str) -> None:
        for name in list(left):
            finish(_failed(name, 0, f"not run: {why}", ""))

    while left:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            child = _Child(command, left, pathlib.Path(folder), checked)
            # The first part's time includes the start of the process.
            current, since, before = left[0], time.monotonic(), len(done)
            try:
                while True:
                    ended = child.process.poll()
                    for line in child.new_lines():
                        if "nothing" in line:
                            return str(line["nothing"])
                        if "start" in line:
                            current, since = line["start"], time.monotonic()
                        elif "waits" in line:
                            waits += line["waits"]
                        else:
                            finish(line)
                    spent = time.monotonic() - since
                    if not left:
                        break
                    if ended is not None:
                        # One that stopped between parts has said what was wrong.
                        if current in left and (ended != 0 or len(done) == before):
                            finish(_failed(current, spent, _ended(ended), child.last_words()))
                        break
                    if spent > limit_s and current not in left:
                        break  # a part has failed, and the process does not end
                    if spent > limit_s:
                        gone = child.kill()
                        killed += 1
                        why = f"did not end within {limit_s:g} s: killed"
                        finish(_failed(current, spent, why, child.last_words()))
                        if not gone:
                            give_up("the process of the part before could not be killed")
                        elif killed == _MOST_KILLED:
                            give_up(f"{killed} parts had to be killed")
                        break
                    time.sleep(_POLL_S)
            finally:
                child.kill()
    return done


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_w4a4 selftest",
        description="Tests the kernels on the first CUDA device: probes of one assumption each, "
        "exact and random products, repeated runs. Nothing leaves this machine.",
        epilog=f"Exit status: {PASSED} all passed, {FAILED} something failed, {USAGE} bad "
        f"arguments, {NOTHING_TO_TEST} no GPU or no kernel for it. A run of all parts is recorded "
        f"in {record.folder()} ({record.ENV_CACHE} names another folder).",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the report here")
    parser.add_argument("--list", action="store_true", help="print the parts and stop")
    parser.add_argument(
        "--part", action="append", default=[], metavar="NAME",
        help="only this part; repeatable; leaves no record",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=LIMIT_S, metavar="S",
        help=f"seconds for a part, then it is killed (default {LIMIT_S:g})",
    )  # fmt: skip
    parser.add_argument(
        "--checked", action="store_true", default=os.environ.get(_ffi.ENV_CHECKED) == "1",
        help="with the kernels whose waits end, naming role, barrier and stage, and whose accesses "
        "to tensor memory are checked; leaves no record",
    )  # fmt: skip
    return parser


@contextlib.contextmanager
def _stopped_by_term() -> Iterator[None]:
    """SIGTERM ends this process through its cleanup, which takes the parts' process along."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(argv: Sequence[str], command: Sequence[str] = COMMAND) -> int:
    """The command; returns its exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    from jax_w4a4.selftest import parts

    if options.list:
        for name in parts.PARTS:
            print(f"{name:14} {parts.describe(name)}")
        return PASSED
    if unknown := set(options.part) - set(parts.PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; --list prints them")
    if not options.limit > 0:
        parser.error(f"--limit is {options.limit:g}; expected seconds above 0")
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        parser.error(f"--json is {options.json}; expected a file in a folder that is there")
    if options.checked and not _ffi.has_checked():
        print(f"Nothing to test: {_ffi.NO_CHECKED}")
        return NOTHING_TO_TEST
    names = [name for name in parts.PARTS if not options.part or name in options.part]

    def tell(part: dict[str, Any]) -> None:
        failures = part["failures"]
        state = "FAILED" if failures else "passed"
        print(f"{part['part']:14} {state}  {part['checks']:5} checks {part['seconds']:7.1f} s",
              flush=True)  # fmt: skip
        for text in failures:
            print(f"    {text}")
        if part["more_failures"]:
            print(f"    and {part['more_failures']} more")

    with _stopped_by_term():
        found = run(
            names, command=command, limit_s=options.limit, checked=options.checked, tell=tell
        )
    if isinstance(found, str):
        print(f"Nothing to test: {found}. Without a kernel the operator runs as the XLA reference; "
              "`python -m emulator` in the source tree runs kernels without a GPU.")  # fmt: skip
        return NOTHING_TO_TEST
    report = {
        "jax_w4a4": jax_w4a4.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passed": all(not part["failures"] for part in found),
        "all_parts": len(names) == len(parts.PARTS),
        "checked": options.checked,
        "seconds": round(sum(part["seconds"] for part in found), 1),
        "parts": found,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    _conclude(report)
    return PASSED if report["passed"] else FAILED


def _conclude(report: dict[str, Any]) -> None:
    failed = [part["part"] for part in report["parts"] if part["failures"]]
    total = len(report["parts"])
    if failed:
        print(f"{len(failed)} of {total} parts FAILED; look at the first: {failed[0]}")
    else:
        print(f"all {total} parts passed in {report['seconds']} s")
    facts: dict[str, Any] = next(
        (p["facts"] for p in report["parts"] if p["part"] == "preflight"), {}
    )
    if report["checked"]:
        print("no record: these are not the kernels that a program runs")
        return
    if not report["all_parts"] or not facts.get("extension_sha256") or not facts.get("driver"):
        return
    found = record.Identity(facts["gpu"], facts["driver"], facts["extension_sha256"])
    try:
        print(f"recorded in {record.save(found, report)}")
    except OSError as error:
        print(f"the record could not be written: {error}")
