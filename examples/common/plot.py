"""A page of small line plots as an SVG, for the examples' figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

COLOURS = ("#1f6fb4", "#b03030", "#3a8a3a", "#8a5ab0", "#c07a10", "#444444")
WIDTH, HEIGHT, COLUMNS = 210, 130, 3


@dataclass
class Panel:
    """One plot. curves: the x and y values of each curve, by its label. low, high: the ends of the
    y axis.
    """

    title: str
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    low: float = 0.0
    high: float = 1.0


def page(title: str, panels: Sequence[Panel]) -> str:
    """The SVG's text. Every panel has a separate x axis, from its smallest to its largest x."""
    rows = -(-len(panels) // COLUMNS)
    size = f'width="{COLUMNS * (WIDTH + 50) + 20}" height="{rows * (HEIGHT + 60) + 40}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif"'
    body = [f'{head} font-size="11">', f'<text x="20" y="20" font-size="14">{title}</text>']
    for place, panel in enumerate(panels):
        left = 40 + place % COLUMNS * (WIDTH + 50)
        top = 55 + place // COLUMNS * (HEIGHT + 60)
        body += _drawn(panel, left, top)
    return "\n".join([*body, "</svg>", ""])


def _drawn(panel: Panel, left: int, top: int) -> list[str]:
    every = np.concatenate([np.asarray(x, float) for x, _ in panel.curves.values()])
    begin, end = every.min(), every.max()
    box = f'x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}"'
    elements = [
        f'<text x="{left}" y="{top - 6}">{panel.title}</text>',
        f'<rect {box} fill="none" stroke="#999999"/>',
        f'<text x="{left - 4}" y="{top + 9}" text-anchor="end">{panel.high:g}</text>',
        f'<text x="{left - 4}" y="{top + HEIGHT}" text-anchor="end">{panel.low:g}</text>',
        f'<text x="{left}" y="{top + HEIGHT + 13}">{begin:g}</text>',
        f'<text x="{left + WIDTH}" y="{top + HEIGHT + 13}" text-anchor="end">{end:g}</text>',
    ]
    for number, (label, (x, y)) in enumerate(panel.curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        across = left + (np.asarray(x) - begin) / (end - begin or 1) * WIDTH
        share = (np.asarray(y) - panel.low) / (panel.high - panel.low)
        down = top + (1 - np.clip(np.nan_to_num(share, nan=1.0), 0, 1)) * HEIGHT
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(across, down, strict=True))
        elements.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        at = f'x="{left + 6}" y="{top + 13 + 12 * number}"'
        elements.append(f'<text {at} fill="{colour}">{label}</text>')
    return elements
