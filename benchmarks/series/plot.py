"""The plot of the results, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, TOP, GAP = 380, 260, 60, 40, 84
COLORS = {"zfp": "#1f6f8b", "SZ3": "#8a5a00", "PCA": "#6b4fa0", "autoencoder": "#c0392b"}
Point = tuple[str, float, float, float, float]
"""Name, compression, error of the gradient, seconds, seconds of revolve at equal memory."""


def plot(points: Sequence[Point]) -> str:
    """Return two panels over the compression: the error of the gradient, and the time for one."""
    lossy = [point for point in points if point[2] > 0]
    most = math.ceil(math.log10(max(point[1] for point in points)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * (WIDTH + GAP) + LEFT} {HEIGHT + TOP + 50}" '
        'font-family="sans-serif" font-size="12" fill="#222">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        *_panel(0, "relative error of the gradient", most, _decades([point[2] for point in lossy])),
        *(_dot(0, point, most, point[2], _decades([each[2] for each in lossy])) for point in lossy),
    ]
    seconds = _decades([value for point in points for value in point[3:]])
    parts += _panel(1, "CPU seconds for a gradient", most, seconds)
    ordered = sorted((point[1], point[4]) for point in points)
    line = " ".join(f"{_x(1, ratio, most):.1f},{_y(value, seconds):.1f}" for ratio, value in ordered)
    parts.append(f'<polyline points="{line}" fill="none" stroke="#555" stroke-width="2" stroke-dasharray="5 4"/>')
    ratio, value = ordered[-1]
    parts.append(
        f'<text x="{_x(1, ratio, most) - 6:.1f}" y="{_y(value, seconds) + 16:.1f}" '
        'text-anchor="end">revolve at equal memory</text>'
    )
    parts += [_dot(1, point, most, point[3], seconds) for point in points]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _decades(values: list[float]) -> tuple[int, int]:
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _x(panel: int, ratio: float, most: int) -> float:
    return LEFT + panel * (WIDTH + GAP) + WIDTH * math.log10(ratio) / most


def _y(value: float, decades: tuple[int, int]) -> float:
    low, high = decades
    return TOP + HEIGHT * (high - math.log10(value)) / (high - low)


def _panel(panel: int, title: str, most: int, decades: tuple[int, int]) -> list[str]:
    left = LEFT + panel * (WIDTH + GAP)
    parts = [f'<text x="{left}" y="{TOP - 16}" font-size="13">{title}</text>']
    for power in range(decades[0], decades[1] + 1):
        y = _y(10.0**power, decades)
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for power in range(most + 1):
        x = _x(panel, 10.0**power, most)
        parts.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{10**power}</text>')
    middle = left + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{TOP + HEIGHT + 38}" text-anchor="middle">compression</text>')
    return parts


def _dot(panel: int, point: Point, most: int, value: float, decades: tuple[int, int]) -> str:
    name, ratio = point[0], point[1]
    x, y = _x(panel, ratio, most), _y(value, decades)
    color = next((color for start, color in COLORS.items() if name.startswith(start)), "#222")
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
        f'<text x="{x:.1f}" y="{y - 8:.1f}" font-size="10" text-anchor="middle" fill="{color}">{name}</text>'
    )
