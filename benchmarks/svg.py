"""Panels with a grid, as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Box = tuple[float, float, float, float]
"""Left, top, width and height."""


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    style = 'font-family="sans-serif" font-size="12" fill="#222">'
    return "\n".join([head + style, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start", size: int = 12, color: str = "#222") -> str:
    fonts = f'font-size="{size}" text-anchor="{anchor}" fill="{color}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {fonts}>{words}</text>'


def line(points: Iterable[tuple[float, float]], color: str, width: int = 2, dash: str = "") -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    stroke = f'stroke="{color}" stroke-width="{width}"' + (f' stroke-dasharray="{dash}"' if dash else "")
    return f'<polyline points="{places}" fill="none" {stroke}/>'


def panel(
    box: tuple[float, float, float, float],
    title: str,
    label: str,
    across: Mapping[float, str],
    up: Mapping[float, str],
) -> list[str]:
    """Return the grid of a box, with labels at these places."""
    left, top, width, height = box
    parts = [text(left, top - 16, title, size=13), text(left + width / 2, top + height + 36, label, "middle")]
    for y, words in up.items():
        parts += [line([(left, y), (left + width, y)], "#ddd", 1), text(left - 8, y + 4, words, "end")]
    for x, words in across.items():
        parts += [line([(x, top), (x, top + height)], "#ddd", 1), text(x, top + height + 18, words, "middle")]
    return parts
