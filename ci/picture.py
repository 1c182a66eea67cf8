"""Draws docs/pictures/token.svg: one token on four processors, and the kernels of a CUDA graph that
torch.compile created from the same model, on one time axis.

docs/pictures/token.json holds both traces, as `bench/token_trace.py` recorded them on a GPU. Called
by ci/generate.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/pictures/token.json"
PICTURE = ROOT / "docs/pictures/token.svg"
WIDTH, LEFT, TOP, ROW_HEIGHT, GAP = 830, 95, 18, 12, 2
LEGEND_COLUMN = 88
COLOURS = {
    "products": "#4477aa",
    "attention": "#ee6677",
    "embedding": "#228833",
    "others": "#999999",
}
# For each colour, parts of the names of the task kinds and kernels that are drawn in this colour.
NAMES = {
    "products": ("linear", "nvjet", "splitkreduce", "gemm", "gemv"),
    "attention": ("attention", "sdpa", "lean_reduction", "flash", "fmha"),
    "embedding": ("embedding",),
}


@dataclass(frozen=True)
class Span:
    """A task or a kernel. begin, end: in us from the token's first task or kernel."""

    name: str
    colour: str
    begin: float
    end: float


def colour_of(name: str) -> str:
    """The group of a task kind or a kernel. Triton kernels, which may fuse several ops, are in the
    group "others".
    """
    text = name.lower()
    if text.startswith("triton"):
        return "others"
    for colour, parts in NAMES.items():
        if any(part in text for part in parts):
            return colour
    return "others"


def _lane(name: str, spans: Iterable[Span], y: int, scale: float) -> list[str]:
    width = WIDTH - LEFT
    parts = [
        f'<text x="{LEFT - 8}" y="{y + 10}" class="lane">{name}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{width}" height="{ROW_HEIGHT}" class="idle"/>',
    ]
    for span in spans:
        x, wide = LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.3)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW_HEIGHT}" '
            f'fill="{COLOURS[span.colour]}"><title>{escape(span.name)}: '
            f"{span.end - span.begin:.1f} us</title></rect>"
        )
    return parts


def _end(spans: Sequence[Span]) -> float:
    return max(span.end for span in spans)


def picture(data: dict) -> str:
    """The SVG file's text."""
    processors: dict[int, list[Span]] = {}
    for op, kind, processor, begin, end in data["spans"]:
        processors.setdefault(processor, []).append(Span(op, colour_of(kind), begin, end))
    kernels = [Span(name, colour_of(name), begin, end) for name, begin, end in data["kernels"]]
    tasks = [span for spans in processors.values() for span in spans]
    scale = (WIDTH - LEFT) / max(_end(tasks), _end(kernels))
    titles = (
        f"{data['config']}, a token after {data['context']} others, {data['device']}: "
        f"ark's loop kernel, {_end(tasks):.0f} us "
        f"({len(processors)} of {data['processors']} processors)",
        f"torch.compile in a CUDA graph: {len(kernels)} kernels, {_end(kernels):.0f} us",
    )
    label = ". ".join(titles)
    graph = TOP + len(processors) * (ROW_HEIGHT + GAP) + 18
    height = graph + ROW_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}">',
        f"<title>{escape(label)}</title>",
        "<style>text{font:13px Arial,sans-serif;fill:#222}.lane{text-anchor:end;font-size:12px}"
        ".idle{fill:#eeeeee}.small{font-size:12px;fill:#555}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="13">{escape(titles[0])}</text>',
    ]
    for row, (processor, spans) in enumerate(sorted(processors.items())):
        parts += _lane(f"processor {processor}", spans, TOP + row * (ROW_HEIGHT + GAP), scale)
    parts.append(f'<text x="{LEFT}" y="{graph - 6}">{escape(titles[1])}</text>')
    parts += _lane("all processors", kernels, graph, scale)
    x = WIDTH - LEGEND_COLUMN * len(COLOURS)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x}" y="{graph - 16}" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 16}" y="{graph - 6}" class="small">{name}</text>')
        x += LEGEND_COLUMN
    return "\n".join([*parts, "</svg>"]) + "\n"
