"""Writes the output of `ark plan --passes DIR`: a text file with the graph after each pass that
changed it, and a self-contained HTML page. The page shows, for each pass, the changed lines and the
savings. Called by ark.cli.plan.
"""

from __future__ import annotations

import difflib
import html
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ark.cli.common import write_file
from ark.ir.graph import Graph
from ark.ir.text import to_text
from ark.lower.passes import PASSES
from ark.lower.rewrite.context import Context

WHY = {step.name: step.why for step in PASSES}
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
h1 { overflow-wrap: anywhere; } td, th { padding: .2rem .7rem; text-align: right; }
td:first-child, th:first-child, td:last-child { text-align: left; }
pre { overflow-x: auto; font-size: 13px; line-height: 1.35; }
.add { color: light-dark(#116329, #7ee787); } .del { color: light-dark(#a40e26, #ff9492); }
.at { opacity: .6; } details { margin: .7rem 0; } summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Totals:
    """Totals over the ops of a graph. ops: the number of nodes that become tasks. moved: bytes that
    these nodes read and write. held: bytes of the activations (intermediate tensors) that these
    nodes use. least_us: the microseconds in which the memory can move `moved` bytes.
    """

    ops: int
    moved: int
    held: int
    least_us: float

    @classmethod
    def of(cls, graph: Graph, context: Context) -> Totals:
        nodes = [n for n in graph.nodes if not n.virtual]
        tensors = [t for n in nodes for t in (*n.inputs, *n.outputs)]
        moved = sum(t.nbytes for t in tensors)
        buffers = {t.buffer.id: t.buffer for t in tensors if t.buffer.arena == "activation"}
        held = sum(b.nbytes for b in buffers.values())
        return cls(len(nodes), moved, held, moved / context.machine.bandwidth_gbps / 1e3)


@dataclass(frozen=True)
class Change:
    """A pass that changed a graph: the graph's texts and totals before and after it."""

    name: str
    before: str
    after: str
    start: Totals
    end: Totals

    @property
    def types(self) -> str:
        """The changes of the numbers of ops by type, as text."""
        counts = Counter(re.findall(r" = (\w+)\(", self.after))
        counts.subtract(Counter(re.findall(r" = (\w+)\(", self.before)))
        changed = (f"{kind} {number:+d}" for kind, number in sorted(counts.items()) if number)
        return ", ".join(changed) or "operands or order"

    def difference(self) -> Iterator[str]:
        """The lines of a unified diff of the graph's texts, without its header."""
        old, new = self.before.splitlines(), self.after.splitlines()
        return (x for i, x in enumerate(difflib.unified_diff(old, new, n=1, lineterm="")) if i > 1)


@dataclass
class PassPages:
    """Records the graph before and after each pass, as an observer of ark.lower.observe, and writes
    the output folder.
    """

    changes: list[Change] = field(default_factory=list)

    def __call__(self, name: str, before: Graph, after: Graph, context: Context) -> None:
        if after is before:
            return
        texts = to_text(before), to_text(after)
        if texts[0] != texts[1]:
            totals = Totals.of(before, context), Totals.of(after, context)
            self.changes.append(Change(name, *texts, *totals))

    def write(self, folder: str, title: str) -> str:
        """Writes the text files and the HTML page to `folder`. Returns the page's path."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number, change in enumerate(self.changes):
            if number == 0:
                write_file(str(Path(folder) / "00-graph.txt"), change.before)
            write_file(str(Path(folder) / f"{number + 1:02}-{change.name}.txt"), change.after)
        page = str(Path(folder) / "index.html")
        write_file(page, "\n".join(self._page(title)) + "\n")
        return page

    def _page(self, title: str) -> Iterator[str]:
        named = html.escape(title)
        yield f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Passes: {named}</title>'
        yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
        yield f"<style>{STYLE}</style><h1>Passes: {named}</h1>"
        yield f"<p>{len(self.changes)} passes changed the graph. A pass that left it as it was is"
        yield " not shown. Bytes moved are those that ops read and write, each operand once; the"
        yield " least time is these bytes at the machine's memory rate.</p>"
        yield "<table tabindex=0><tr><th>pass<th>ops<th>MB moved"
        yield "<th>MB of activations<th>least us<th>changed"
        for change in self.changes:
            start, end = change.start, change.end
            cells = (
                f"{start.ops} → {end.ops}",
                f"{start.moved / 1e6:,.2f} → {end.moved / 1e6:,.2f}",
                f"{start.held / 1e6:,.2f} → {end.held / 1e6:,.2f}",
                f"{start.least_us:,.1f} → {end.least_us:,.1f}",
                html.escape(change.types),
            )
            yield f"<tr><td><code>{change.name}</code>" + "".join(f"<td>{c}" for c in cells)
        yield "</table>"
        for change in self.changes:
            yield f"<details><summary><code>{change.name}</code>: {html.escape(WHY[change.name])}"
            yield "</summary><pre>"
            yield from map(_coloured, change.difference())
            yield "</pre></details>"
        yield "</html>"


def _coloured(line: str) -> str:
    kind = {"+": "add", "-": "del", "@": "at"}.get(line[:1])
    text = html.escape(line)
    return f'<span class="{kind}">{text}</span>' if kind else text
