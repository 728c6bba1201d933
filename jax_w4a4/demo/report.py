"""The demo's table and plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jax_w4a4.demo.measure import Result

_HEADER = (
    "format",
    "linears",
    "cos mean",
    "cos min",
    "top-1",
    "top-5",
    "Spearman",
    "linears MB",
    "model MB",
    "quantize s",
    "encode ms",
)
_MB = 1e6


def table(results: Sequence[Result]) -> str:
    """The results as aligned text; MB are 10^6 bytes."""
    rows = [_HEADER]
    for r in results:
        rows.append(
            (
                r.format,
                r.label,
                f"{r.mean_cosine:.4f}",
                f"{r.min_cosine:.4f}",
                f"{r.top1_kept:.0%}",
                f"{r.top5_overlap:.0%}",
                f"{r.spearman:.4f}",
                f"{r.linear_bytes / _MB:.2f}",
                f"{r.total_bytes / _MB:.2f}",
                f"{r.quantize_seconds:.1f}" if r.quantize_seconds else "-",
                f"{r.encode_seconds * 1e3:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [_line(row, widths) for row in rows]
    rule = "-" * len(lines[0])
    separated = [lines[0], rule]
    for index, line in enumerate(lines[1:]):
        if index and results[index].format != results[index - 1].format:
            separated.append(rule)
        separated.append(line)
    return "\n".join(separated)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    text = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
    return "  ".join(text + numbers)


def plot(results: Sequence[Result], path: Path) -> None:
    """Draws cosine distance to fp32 and the bytes of the linears; the suffix names the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    baseline, *quantized = results
    formats = list(dict.fromkeys(r.format for r in quantized))
    labels = list(dict.fromkeys(r.label for r in quantized))
    by_key = {(r.format, r.label): r for r in quantized}
    colors = ("#9db4c0", "#2f6690", "#e07a1f")
    width = 0.8 / len(labels)

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    error, size = figure.subplots(1, 2, width_ratios=(3, 2))
    for index, (label, color) in enumerate(zip(labels, colors, strict=False)):
        at = [x + (index - (len(labels) - 1) / 2) * width for x in range(len(formats))]
        rows = [by_key[format, label] for format in formats]
        bar = {"width": width * 0.92, "color": color}
        bars = error.bar(at, [1.0 - r.mean_cosine for r in rows], label=label, **bar)
        texts = [f"{1.0 - r.mean_cosine:.3f}" for r in rows]
        text_color = "white" if index == 1 else "black"
        error.bar_label(bars, texts, label_type="center", fontsize=8, color=text_color)
        worst = "worst sentence" if index == len(labels) - 1 else None
        error.plot(at, [1.0 - r.min_cosine for r in rows], "k^", markersize=4, label=worst)
        size.bar(at, [r.linear_bytes / _MB for r in rows], **bar)
    error.set_ylim(0.0, 1.12 * max(1.0 - r.min_cosine for r in quantized))
    error.set_ylabel("1 - cosine")
    error.set_title("Distance of sentence embeddings to fp32")
    error.legend(fontsize=8, loc="upper left")
    fp32 = baseline.linear_bytes / _MB
    size.set_ylim(0.0, 1.1 * fp32)
    size.axhline(fp32, color="black", linewidth=1)
    size.text(-0.45, fp32, "fp32", fontsize=8, verticalalignment="bottom")
    size.set_ylabel("MB (10$^6$ bytes)")
    size.set_title("Bytes of the quantized linears")
    for axes in (error, size):
        axes.set_xticks(range(len(formats)), formats)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
