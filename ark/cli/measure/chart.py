"""Draws a bar chart of ratios as SVG, written as text: one row per case, and a line at the ratio 1.
Called by ark.cli.bench_ops and ark.cli.bench_comm.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

ROW, LABEL, WIDTH = 22, 280, 420


def bars(title: str, rows: Sequence[tuple[str, float]]) -> str:
    """The chart as SVG text. rows: (name, ratio), where the ratio is the peer's time divided by
    ark's. A bar that reaches to the right of the line at 1 means that ark is faster.
    """
    most = max([1.25, *(ratio for _, ratio in rows)])
    height = ROW * len(rows) + 60
    one = LABEL + WIDTH / most
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LABEL + WIDTH + 80}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<text x="10" y="22" font-size="14">{escape(title)}</text>',
    ]
    for number, (name, ratio) in enumerate(rows):
        top = 40 + ROW * number
        long = WIDTH * ratio / most
        colour = "#2a7" if ratio >= 1.0 else "#c63"
        lines += [
            f'<text x="{LABEL - 8}" y="{top + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{LABEL}" y="{top}" width="{long:.1f}" height="{ROW - 6}" fill="{colour}"/>',
            f'<text x="{LABEL + long + 6:.1f}" y="{top + 13}">{ratio:.2f}</text>',
        ]
    lines.append(
        f'<line x1="{one:.1f}" x2="{one:.1f}" y1="34" y2="{height - 16}" stroke="#333"/></svg>'
    )
    return "\n".join(lines) + "\n"
