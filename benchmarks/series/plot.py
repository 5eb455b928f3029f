"""The plot of the results, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks import svg

Scale = Callable[[float], float]
WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 260, 60, 40, 84
COLORS = {"zfp": "#1f6f8b", "SZ3": "#8a5a00", "PCA": "#6b4fa0", "autoencoder": "#c0392b"}
Point = tuple[str, float, float, float, float]
"""Name, compression, error of the gradient, seconds, seconds of revolve at equal memory."""


def drawn(points: Sequence[Point]) -> str:
    """Return two panels over the compression: the error of the gradient, and the time for one."""
    most = math.ceil(math.log10(max(point[1] for point in points)))
    lossy = [point for point in points if point[2] > 0]
    parts, x, y = _panel(0, "relative error of the gradient", most, [point[2] for point in lossy])
    parts += [part for point in lossy for part in _dot(point[0], x(point[1]), y(point[2]))]
    seconds = [value for point in points for value in point[3:]]
    more, x, y = _panel(1, "CPU seconds for a gradient", most, seconds)
    ordered = [(x(point[1]), y(point[4])) for point in sorted(points, key=lambda point: (point[1], point[4]))]
    last_x, last_y = ordered[-1]
    parts += [*more, svg.line(ordered, "#555", dash="5 4")]
    parts.append(svg.text(last_x - 6, last_y + 16, "revolve at equal memory", "end"))
    parts += [part for point in points for part in _dot(point[0], x(point[1]), y(point[3]))]
    return svg.picture(2 * (WIDTH + GAP) + LEFT, HEIGHT + TOP + 50, parts)


def _panel(number: int, title: str, most: int, values: list[float]) -> tuple[list[str], Scale, Scale]:
    """Return a panel of whole decades, and where a compression and a value are in it."""
    left = LEFT + number * (WIDTH + GAP)
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))

    def x(ratio: float) -> float:
        return left + WIDTH * math.log10(ratio) / most

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(value)) / (high - low)

    across = {x(10.0**power): f"{10**power}" for power in range(most + 1)}
    up = {y(10.0**power): f"{10.0**power:g}" for power in range(low, high + 1)}
    return svg.panel((left, TOP, WIDTH, HEIGHT), title, "compression", across, up), x, y


def _dot(name: str, x: float, y: float) -> list[str]:
    color = next((color for start, color in COLORS.items() if name.startswith(start)), "#222")
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>',
        svg.text(x, y - 8, name, "middle", 10, color),
    ]
