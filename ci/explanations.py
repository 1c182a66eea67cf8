"""Draws the pictures of the explanation pages: the path of a token, an iteration, a packet compared
with a counter, and the verifier's execution of a plan. Called by ci/generate.py.

A picture is a list of boxes, arrows and lines of text, whose positions are in pixels. The title
describes the picture in words. tests/unit/test_explanations.py checks that the pictures agree with
the code.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs/pictures"
PICTURE_WIDTH = 640
TASK, DATA, WAIT, PLAIN = "#cfe0f3", "#d9efd7", "#f9d5d3", "#eeeeee"
STYLE = (
    "<style>text{font:15px sans-serif;fill:#222}.small{font-size:13px;fill:#444}"
    ".mid{text-anchor:middle}line,path{stroke:#444;stroke-width:1.5;fill:none}"
    "rect{stroke:#888}.page{stroke:none}</style>"
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
    'orient="auto"><path d="M0,0 L8,4 L0,8 z" style="fill:#444;stroke:none"/></marker></defs>'
)
# The ops of a decoder's layer, in the order of their tasks: the op's name in plans, and what the op
# computes.
LAYER = (
    ("attention.query+key+value", "norm, products, rotation; the new key and value"),
    ("attention.attention", "scores over the cache, which is streamed in"),
    ("attention.output", "product; the residual is added"),
    ("mlp.gate+up", "norm, products, silu(gate) * up"),
    ("mlp.down", "product; the residual is added"),
)


@dataclass
class Picture:
    """A picture that is being drawn. title: one sentence that describes it."""

    title: str
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: int, y: int, text: str, style: str = "") -> None:
        """A line of text; y is its baseline."""
        self.parts.append(f'<text x="{x}" y="{y}" class="{style}">{escape(text)}</text>')

    def box(self, x: int, y: int, wide: int, text: str, colour: str, high: int = 30) -> None:
        """A box with a text in its middle."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{wide}" height="{high}" rx="3" fill="{colour}"/>'
        )
        self.text(x + wide // 2, y + high // 2 + 5, text, "mid")

    def arrow(self, *points: tuple[int, int]) -> None:
        """An arrow along these points."""
        path = " L".join(f"{x},{y}" for x, y in points)
        self.parts.append(f'<path d="M{path}" marker-end="url(#head)"/>')

    def svg(self) -> str:
        """The SVG file's text."""
        name = escape(self.title)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {PICTURE_WIDTH} {self.height}" '
            f'role="img" aria-label="{name}">\n<title>{name}</title>\n{STYLE}\n'
            f'<rect class="page" width="{PICTURE_WIDTH}" height="{self.height}" fill="#ffffff"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def token() -> Picture:
    """The path of a token through an iteration."""
    p = Picture("The way of a token: one iteration reads it from memory and writes the next", 520)
    p.box(40, 16, 400, "tokens[position], in the device's memory", DATA)
    p.arrow((240, 46), (240, 64))
    p.box(40, 64, 400, "embed: the token's row of the table", TASK)
    p.arrow((240, 94), (240, 120))
    p.parts.append('<rect x="24" y="120" width="600" height="230" rx="4" fill="#f7f7f7"/>')
    p.text(550, 342, "each layer", "small")
    for row, (name, summary) in enumerate(LAYER):
        y = 130 + row * 43
        p.box(40, y, 214, name, TASK)
        p.text(264, y + 20, summary, "small")
        if row < len(LAYER) - 1:
            p.arrow((147, y + 30), (147, y + 43))
    p.arrow((147, 332), (147, 376))
    p.text(160, 368, "packets {value, iteration} carry each row from op to op", "small")
    p.box(40, 376, 400, "head.logits: one score for each token", TASK)
    p.arrow((240, 406), (240, 424))
    p.box(40, 424, 400, "sample.choose: draws the next token", TASK)
    p.arrow((240, 454), (240, 472))
    p.box(40, 472, 400, "tokens[position + 1]; position is one more", DATA)
    p.arrow((440, 487), (632, 487), (632, 31), (442, 31))
    p.text(470, 480, "next iteration", "small")
    return p


def iteration() -> Picture:
    """Draws two iterations on three processors, and the barrier between the iterations."""
    p = Picture("Two iterations on three processors; counter 0 opens the second", 330)
    processors = (("processor 0", (90, 70)), ("processor 1", (120, 60)), ("processor 2", (60, 90)))
    p.text(110, 24, "iteration i")
    p.text(400, 24, "iteration i + 1")
    for row, (name, widths) in enumerate(processors):
        y = 40 + row * 50
        p.text(10, y + 20, name, "small")
        for start in (110, 400):
            x = start
            for number, wide in enumerate(widths):
                p.box(x, y, wide, f"task {number}", TASK)
                x += wide + 8
        p.arrow((110 + sum(widths) + 8, y + 15), (330, y + 15))
    p.box(332, 40, 36, "0", WAIT, 130)
    p.arrow((368, 105), (398, 105))
    p.text(
        10,
        204,
        "Last tasks signal counter 0, the iteration barrier, which is never reset: iteration",
    )
    p.text(10, 224, "i + 1 begins at step * (i + 1). A wait for n signals is for step * i + n.")
    p.text(10, 254, "Before it waits, processor 0 asks the host whether to leave.")
    p.text(10, 274, "A stop token lowers the limit of iterations: no later one begins.")
    p.text(10, 304, "A warp that loads fetches the next weights meanwhile: no task writes them.")
    return p


def packets() -> Picture:
    """A dependence as a counter and as packets."""
    p = Picture("One dependence as a counter, and as packets whose load is the wait", 372)
    p.text(10, 24, "Counter: any memory, any size")
    p.box(10, 40, 130, "write the tile", TASK)
    p.box(150, 40, 180, "release: counter + 1", WAIT)
    p.arrow((245, 70), (245, 96), (350, 96), (350, 122))
    p.box(270, 124, 180, "acquire: counter >= n", WAIT)
    p.box(460, 124, 120, "read the tile", TASK)
    p.text(10, 90, "producer", "small")
    p.text(460, 174, "consumer", "small")
    p.text(10, 214, "Packet: small fp32 rows, one writer an iteration")
    p.box(10, 230, 230, "store {value, i} in 8 bytes", TASK)
    p.arrow((125, 260), (125, 286), (350, 286), (350, 300))
    p.box(230, 302, 240, "load until the epoch is i", WAIT)
    p.text(10, 280, "producer", "small")
    p.text(480, 322, "consumer: the value", "small")
    p.text(
        10,
        356,
        "i is the number of the iteration, so nothing is reset between iterations.",
        "small",
    )
    return p


def verifier() -> Picture:
    """The abstract execution of a correct plan and of a plan that deadlocks."""
    p = Picture("The verifier executes a plan abstractly: one ends, one deadlocks", 352)
    p.text(10, 24, "A sound plan: each task runs once its waits are met")
    p.text(10, 60, "processor 0", "small")
    p.box(110, 40, 140, "A: signals c1", TASK)
    p.box(430, 40, 140, "C: waits c2", TASK)
    p.text(10, 106, "processor 1", "small")
    p.box(200, 86, 210, "B: waits c1, signals c2", TASK)
    p.arrow((180, 70), (180, 101), (198, 101))
    p.arrow((410, 101), (500, 101), (500, 72))
    p.text(10, 156, "Step 1: A. Step 2: B. Step 3: C. All have run, so no execution hangs.")
    p.text(10, 206, "A plan that deadlocks: no task can run first")
    p.text(10, 242, "processor 0", "small")
    p.box(110, 222, 200, "A: waits c2", WAIT)
    p.box(330, 222, 200, "C: signals c1", PLAIN)
    p.text(10, 288, "processor 1", "small")
    p.box(110, 268, 200, "B: waits c1", WAIT)
    p.box(330, 268, 200, "D: signals c2", PLAIN)
    p.arrow((430, 252), (430, 260), (210, 260), (210, 267))
    p.arrow((330, 290), (318, 290), (318, 237), (311, 237))
    p.text(110, 326, '"its waits deadlock: 4 tasks never start, the first is ..."')
    return p


def pictures() -> dict[Path, str]:
    """The contents of all pictures by file path."""
    drawn = {"way": token(), "iteration": iteration(), "packets": packets(), "verifier": verifier()}
    return {FOLDER / f"{name}.svg": picture.svg() for name, picture in drawn.items()}
