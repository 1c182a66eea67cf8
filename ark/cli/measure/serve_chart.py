"""Draws a server's times against the rate of requests, as SVG: the time to the first token and the
time between pieces of text, with a line for each percentile. Called by ark.cli.bench_serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from ark.cli.measure.serve import SHARES, Summary

PANELS = {"time to the first token": "first_s", "time between pieces of text": "between_s"}
COLOURS = {"p50": "#2a7", "p90": "#37b", "p99": "#c63"}
PANEL_WIDTH_PX, PANEL_HEIGHT_PX, MARGIN_PX, TOP_PX = 300, 200, 64, 56


def curves(title: str, measured: Sequence[Summary]) -> str:
    """The chart as SVG text, with a panel for each kind of time. measured: a summary for each rate
    of requests, in the order of the x axis.
    """
    width = len(PANELS) * (PANEL_WIDTH_PX + MARGIN_PX) + MARGIN_PX
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{TOP_PX + PANEL_HEIGHT_PX + 64}" font-family="sans-serif" font-size="12">',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for place, share in enumerate(SHARES):
        x = width - 44 * (len(SHARES) - place)
        lines.append(f'<text x="{x}" y="20" fill="{COLOURS[share]}">{share}</text>')
    for place, (label, times) in enumerate(PANELS.items()):
        left = MARGIN_PX + place * (PANEL_WIDTH_PX + MARGIN_PX)
        lines += _panel(label, times, measured, left)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(label: str, times: str, measured: Sequence[Summary], left: int) -> Iterator[str]:
    """The lines and axes of one kind of time. Below the axis are the rates of requests, each with
    its goodput (requests per second that met the goals).
    """
    values = [getattr(one, times) for one in measured]
    most = max((seconds for each in values for seconds in each.values()), default=0.0) or 1.0
    bottom, step = TOP_PX + PANEL_HEIGHT_PX, PANEL_WIDTH_PX / max(1, len(measured) - 1)
    yield f'<text x="{left}" y="{TOP_PX - 12}">{label}, ms</text>'
    for part in (0.0, 0.5, 1.0):
        y = bottom - part * PANEL_HEIGHT_PX
        yield f'<path d="M{left} {y:.1f}h{PANEL_WIDTH_PX}" stroke="#ccc"/>'
        yield (
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{part * most * 1e3:.4g}</text>'
        )
    for place, one in enumerate(measured):
        x = left + place * step
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{one.rate:g}/s</text>'
        if one.goodput is not None:
            good = f"{one.goodput:.2f} good/s"
            yield f'<text x="{x:.1f}" y="{bottom + 34}" text-anchor="middle">{good}</text>'
    for share, colour in COLOURS.items():
        points = [
            (left + place * step, bottom - each[share] / most * PANEL_HEIGHT_PX)
            for place, each in enumerate(values)
            if each
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        yield f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
        for x, y in points:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
