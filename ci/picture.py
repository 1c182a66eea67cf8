"""Draws docs/pictures/token.svg: one token on the processors, and beside the same in a CUDA graph.

`python ci/picture.py TRACE` keeps the shortest iteration of a file that `ark trace` wrote, as
docs/pictures/token.json; `python ci/generate.py` draws that. The lanes are the trace of a CPU. The
bars are times that were measured on a GPU, whose trace is not recorded (LOG has them).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs/pictures/token.json"
PICTURE = ROOT / "docs/pictures/token.svg"
WIDTH, LEFT, LANE, GAP = 960, 110, 26, 6
LOG = ROOT / "docs/history/performance.md"
# Llama 3.2 1B, a token, H100, 2026-11-21: us of the loop kernel, and of torch.compile's CUDA graph.
LOOP_KERNEL_US, CUDA_GRAPH_US = 1079, 1415
COLOURS = {
    "linear": "#4477aa",
    "attention": "#ee6677",
    "embedding": "#228833",
    "choose": "#aa3377",
}


@dataclass(frozen=True)
class Span:
    """A task on a processor; begin and end in us from the iteration's first task."""

    op: str
    kind: str
    processor: int
    begin: float
    end: float


def shortest(trace: Path) -> dict:
    """The iteration that took the least, and what was traced."""
    text = json.loads(trace.read_text())
    by_iteration: dict[int, list[dict]] = {}
    for event in text["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 1:
            by_iteration.setdefault(event["args"]["iteration"], []).append(event)
    # The first iterations may be those of the prompt.
    tasks = max(map(len, list(by_iteration.values())[-3:]))
    rows = min(
        (events for events in by_iteration.values() if len(events) == tasks),
        key=lambda events: max(e["ts"] + e["dur"] for e in events) - min(e["ts"] for e in events),
    )
    start = min(event["ts"] for event in rows)
    spans = [
        [e["name"], e["cat"], e["tid"], e["ts"] - start, e["ts"] + e["dur"] - start] for e in rows
    ]
    return {
        "device": text["otherData"]["device"],
        "spans": [[*s[:3], *(round(t, 2) for t in s[3:])] for s in spans],
    }


def _lanes(spans: Sequence[Span], top: int, scale: float, processors: int) -> list[str]:
    parts = []
    for processor in range(processors):
        y = top + processor * (LANE + GAP)
        parts.append(
            f'<text x="{LEFT - 10}" y="{y + 17}" class="lane">processor {processor}</text>'
        )
        parts.append(
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 10}" height="{LANE}" class="idle"/>'
        )
    for span in spans:
        x, width = LEFT + span.begin * scale, max((span.end - span.begin) * scale, 0.5)
        y = top + span.processor * (LANE + GAP)
        colour = COLOURS.get(span.kind, "#888888")
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE}" fill="{colour}">'
            f"<title>{escape(span.op)}: {span.end - span.begin:.1f} us</title></rect>"
        )
    return parts


def picture(data: dict) -> str:
    """The SVG."""
    spans = [Span(*row) for row in data["spans"]]
    end = max(span.end for span in spans)
    processors = max(span.processor for span in spans) + 1
    bars = 42 + processors * (LANE + GAP) + 46
    height = bars + 2 * (LANE + GAP) + 60
    titles = (
        f"A token of examples/noah, {len(spans)} tasks of one loop kernel: {end:.0f} us "
        f"({data['device']}, traced)",
        "A token of Llama 3.2 1B on an H100 (measured 2026-11-21)",
    )
    pairs = (("loop kernel", LOOP_KERNEL_US), ("CUDA graph", CUDA_GRAPH_US))
    label = f"{titles[0]}. {titles[1]}: " + ", ".join(f"{name} {us} us" for name, us in pairs)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}">',
        f"<title>{escape(label)}</title>",
        "<style>text{font:14px sans-serif;fill:#222}.lane{text-anchor:end;font-size:12px}"
        ".idle{fill:#eeeeee}.small{font-size:12px;fill:#555}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28">{escape(titles[0])}</text>',
        *_lanes(spans, 42, (WIDTH - LEFT - 10) / end, processors),
        f'<text x="{LEFT}" y="{bars - 14}">{escape(titles[1])}</text>',
    ]
    for row, (name, us) in enumerate(pairs):
        y, width = bars + row * (LANE + GAP), (WIDTH - LEFT - 90) * us / CUDA_GRAPH_US
        colour = COLOURS["linear"] if row == 0 else "#999999"
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 17}" class="lane">{name}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{LANE}" fill="{colour}"/>',
            f'<text x="{LEFT + width + 8:.0f}" y="{y + 18}">{us} us</text>',
        ]
    x = LEFT
    for kind in dict.fromkeys(span.kind for span in spans):
        colour = COLOURS.get(kind, "#888888")
        parts.append(f'<rect x="{x}" y="{height - 40}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{height - 28}" class="small">{escape(kind)}</text>')
        x += 120
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(argv: list[str]) -> int:
    (trace,) = argv
    DATA.parent.mkdir(exist_ok=True)
    DATA.write_text(json.dumps(shortest(Path(trace)), indent=None) + "\n")
    PICTURE.write_text(picture(json.loads(DATA.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
