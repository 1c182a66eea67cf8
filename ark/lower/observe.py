"""Who watches the passes: `ark plan --passes` and ARK_DEBUG=passes. Told by ark.lower.prepare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from ark.ir.graph import Graph
from ark.lower.rewrite.context import Context

Observer = Callable[[str, Graph, Graph, Context], None]
"""Told of a pass by name, with the graph before and after it and what the pass was given. Behind
the choice of variants a graph holds the phases of one kernel."""

_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Within it, `observer` is told of every pass over every graph that this thread plans."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


def observer() -> Observer | None:
    """The observer in force, if there is one."""
    return _observer.get()
