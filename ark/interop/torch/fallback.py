"""Graphs of torch.compile that torch runs where ark cannot: an error of ark's, when a graph is
compiled or called, is one warning and never the end of torch.compile. Called by compile.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ark import log
from ark.errors import BaseError, GpuError
from ark.interop.torch.program import Program

Run = Callable[..., Any]


def or_torch(module: fx.GraphModule, compiled: Callable[[], Run]) -> Run:
    """The graph as `compiled` makes it, which leaves the module as it is; from ark's first error
    on, the graph as torch runs it.

    A function of a list of the graph's arguments, which is how AOTAutograd calls what has
    _boxed_call. GpuError is raised, since a device that failed may have spoilt results before.
    """
    graph = _Graph(module, compiled)

    def call(given: list[Any]) -> Any:
        return graph(given)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


class _Graph:
    def __init__(self, module: fx.GraphModule, compiled: Callable[[], Run]) -> None:
        self._module = module
        self._run: Run = module
        try:
            self._run = compiled()
        except GpuError:
            raise
        except Exception as error:  # whatever ark's planner, lowering and compilers raise
            self._leave(error)

    def __call__(self, given: list[Any]) -> Any:
        run = self._run
        try:
            return run.run(given) if isinstance(run, Program) else run(*given)
        except GpuError:
            raise
        except BaseError as error:
            if run is self._module:
                raise
            self._leave(error)
        return self._module(*given)

    def _leave(self, error: Exception) -> None:
        self._run = self._module
        kind = "" if isinstance(error, BaseError) else f"{type(error).__name__}: "
        words = " ".join(str(error).split())[:300]
        nodes = sum(n.op == "call_function" for n in self._module.graph.nodes)
        log.warn(f"a graph of {nodes} operators runs in torch, because ark failed: {kind}{words}")
