"""Shows what the compiler does: observer functions that are called after each pass
(`ark plan --passes`), and the texts that ARK_DEBUG=passes,lower,plan prints. Called by
ark.lower.prepare and ark.lower.pipeline.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from ark.ir.graph import Graph
from ark.ir.text import to_text
from ark.log import show
from ark.lower.rewrite.context import Context
from ark.plan.cost import Span, phase_us, predict
from ark.plan.groups import Group
from ark.plan.types import Plan

MAX_LISTED_OPS = 5  # most ops listed per phase

Observer = Callable[[str, Graph, Graph, Context], None]
"""A function that is called after each pass with the pass's name, the graph before and after it,
and its context. In passes that run after kernel variants are chosen, a graph may contain the phases
of only one kernel.
"""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """A context manager. Within it, `observer` is called for every pass over every graph that this
    thread plans.
    """
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observer() -> Observer | None:
    """The current observer, or None."""
    return _observer.get()


def show_pass(name: str, before: Graph, after: Graph) -> None:
    """Prints how a pass changed the number of ops of each type. Prints nothing if it did not change
    the graph.
    """
    if after is before or to_text(after) == to_text(before):
        return
    ops = [Counter(n.type for n in g.nodes if not n.virtual) for g in (before, after)]
    counts = Counter(ops[1])
    counts.subtract(ops[0])
    changed = (f"{kind} {number:+d}" for kind, number in sorted(counts.items()) if number)
    totals = f"{ops[0].total()} -> {ops[1].total()} ops"
    show("passes", f"{name}: {totals}: {', '.join(changed) or 'operands or order'}")


def cuts_text(groups: Sequence[Group]) -> str:
    """Describes how ops are tiled, in one line of text for each set of ops that are tiled equally.
    A line has the ops' names, their task kind, the shapes of their first three operands, the shape
    of a tile, the number of parts into which k (the summed dimension of a matmul) is divided, and
    the number of tasks.
    """
    names: dict[str, list[str]] = {}
    for group in groups:
        if tile := getattr(group.params, "tile", ()):
            parts, tasks = getattr(group.params, "splits", 1), len(group.coords)
            split = f", {parts} parts of k" if parts > 1 else ""
            sizes = (_size(t.shape) for t in group.operands[:3])
            text = f"{group.kind} of {', '.join(sizes)}: tiles {_size(tile)}{split}, {tasks} tasks"
            names.setdefault(text, []).append(group.name)
    return "\n".join(f"{_listed(listed)}: {text}" for text, listed in names.items())


def _size(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def plan_text(plan: Plan) -> str:
    """Describes a plan as text. Each phase has a line with its predicted time, its number of tasks
    and the number of processors that have tasks. Below it, each of the phase's slowest ops has a
    line with the op's duration and start, its number of tasks and the duration of its longest task.
    """
    lines = []
    for number, phase in enumerate(plan.phases):
        us = phase_us(plan, number)
        busy = sum(bool(tasks) for tasks in phase.processors)
        tasks = sum(map(len, phase.processors))
        lines.append(
            f"phase {phase.name or 'all'}: predicted {us:.4g} us, {tasks} tasks, "
            f"{busy} of {len(phase.processors)} task lists busy"
        )
        lines += _slowest(plan, number)
    return "\n".join(lines)


def _slowest(plan: Plan, number: int) -> list[str]:
    """Lines for the ops of a phase with the longest time from the begin of their first task to the
    end of their last.
    """
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in predict(plan, number):
        spans[span.task.op].append(span)
    lines = []
    lasts = {op: max(s.end for s in of) - min(s.begin for s in of) for op, of in spans.items()}
    for op in sorted(lasts, key=lambda op: (-lasts[op], op))[:MAX_LISTED_OPS]:
        of = spans[op]
        begin, lists = min(s.begin for s in of), len({s.processor for s in of})
        longest = max(s.end - s.begin for s in of)
        lines.append(
            f"  {plan.ops[op].name}: {lasts[op]:.4g} us from {begin:.4g}; {len(of)} tasks of at "
            f"most {longest:.3g} us in {lists} lists"
        )
    return lines
