"""`python -m bench.plot RESULT.json PICTURE.svg`: time against M of `bench.decode --crossover`.

From a dashed line on another kernel runs a route. Points that measure the host are circled.
"""

import json
import math
import pathlib
import sys

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 300, 54, 34, 24
COLORS = ("#777777", "#c0392b", "#2471a3", "#1e8449", "#7d3c98", "#b9770e")


def ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of `base` from low to high."""
    first, last = math.floor(math.log(low, base)), math.ceil(math.log(high, base))
    return [float(base) ** i for i in range(first, last + 1)]


def in_decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from the last below low to the first above high."""
    every = [step * tens for tens in ticks(low, high, 10) for step in (1, 2, 5)]
    first = max(i for i, each in enumerate(every) if each <= low)
    last = min(i for i, each in enumerate(every) if each >= high)
    return every[first : max(last, first + 1) + 1]


def switches(rows: list[dict]) -> list[tuple[int, str]]:
    """(M, kernel) of the points of one route from which on another kernel runs it."""
    kernels = [(row["m"], row["plan"].split()[0]) for row in rows if row.get("plan")]
    kernels.sort()
    pairs = zip(kernels, kernels[1:], strict=False)
    return [(m, kernel) for (_, before), (m, kernel) in pairs if kernel != before]


def panel(rows: list[dict], left: float, title: str, names: list[str]) -> list[str]:
    """One log-log plot of microseconds against M."""
    xs, ys = [r["m"] for r in rows], [r["us"] for r in rows]
    x_ticks, y_ticks = ticks(min(xs), max(xs), 4), in_decades(min(ys), max(ys))

    def place(m: float, us: float) -> tuple[float, float]:
        x = math.log(m / x_ticks[0]) / math.log(x_ticks[-1] / x_ticks[0])
        y = math.log(us / y_ticks[0]) / math.log(y_ticks[-1] / y_ticks[0])
        return left + x * WIDTH, TOP + (1 - y) * HEIGHT

    out = [f'<text x="{left + WIDTH / 2:.0f}" y="{TOP - 12}" text-anchor="middle">{title}</text>']
    for m in x_ticks:
        x, _ = place(m, y_ticks[0])
        out.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{m:g}</text>')
    for us in y_ticks:
        _, y = place(x_ticks[0], us)
        out.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{us:g}</text>')
    for name, color in zip(names, COLORS, strict=False):
        own = [row for row in rows if row["route"] == name]
        points = sorted((row["m"], row["us"]) for row in own)
        path = " ".join("{:.1f},{:.1f}".format(*place(m, us)) for m, us in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for m, kernel in switches(own):
            x, _ = place(m, y_ticks[0])
            dashed = f'stroke="{color}" stroke-dasharray="4 3"'
            out.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" {dashed}/>')
            out.append(
                f'<text x="{x + 4:.1f}" y="{TOP + HEIGHT - 6}" fill="{color}">{kernel}</text>'
            )
        for row in own:
            if row.get("host_bound"):
                x, y = place(row["m"], row["us"])
                at = f'cx="{x:.1f}" cy="{y:.1f}" r="5"'
                out.append(f'<circle {at} fill="none" stroke="{color}"/>')
    return out


def draw(result: dict) -> str:
    rows = [row for row in result["rows"] if "us" in row]
    shapes = list(dict.fromkeys((row["k"], row["n"]) for row in rows))
    names = list(dict.fromkeys(row["route"] for row in rows))
    body = []
    for i, (k, n) in enumerate(shapes):
        left = LEFT + i * (WIDTH + LEFT + GAP)
        own = [row for row in rows if (row["k"], row["n"]) == (k, n)]
        body += panel(own, left, f"K={k}, N={n}: us against M", names)
    for i, (name, color) in enumerate(zip(names, COLORS, strict=False)):
        x, y = LEFT + i * 240, TOP + HEIGHT + 44
        body.append(f'<path d="M{x} {y - 4}h24" stroke="{color}" stroke-width="2"/>')
        body.append(f'<text x="{x + 30}" y="{y}">{name}</text>')
    where = result["environment"]
    note = f"{where['device']}, jax {where['jax']}, {where['date']}, {where['command']}"
    if any(row.get("host_bound") for row in rows):
        note += "; circled: bound by the host"
    note = note.replace("&", "&amp;").replace("<", "&lt;")
    body.append(f'<text x="{LEFT}" y="{TOP + HEIGHT + 68}" fill="#555">{note}</text>')
    width = len(shapes) * (WIDTH + LEFT + GAP) + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{TOP + HEIGHT + 84}"'
    style = 'font-family="sans-serif" font-size="12">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([f"{head} {style}", ground, *body, "</svg>"]) + "\n"


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__)
        return 2
    result = json.loads(pathlib.Path(sys.argv[1]).read_text())
    pathlib.Path(sys.argv[2]).write_text(draw(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
