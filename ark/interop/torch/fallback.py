"""Runs graphs of torch.compile in torch if ark fails. An error of ark, when a graph is compiled or
called, gives one warning and never ends torch.compile. Called by compile.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ark import log
from ark.errors import BaseError, GpuError
from ark.interop.torch.program import LEFT, Program

Run = Callable[..., Any]


def or_torch(module: fx.GraphModule, compiled: Callable[[], Run]) -> Run:
    """Returns a function that runs the graph in ark, by the function that `compiled` returns. After
    ark's first error, it runs the graph in torch instead. The module is not changed.

    The returned function takes a list of the graph's arguments, as AOTAutograd passes them to
    objects with the attribute _boxed_call. A GpuError is not handled in this way but raised,
    because a failed device may have corrupted earlier results.
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
        except Exception as error:  # ark's planner, lowering or a compiler may raise any error
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
        LEFT.append(f"a graph of {nodes} operators: {kind}{words}")
        log.warn(f"a graph of {nodes} operators runs in torch, because ark failed: {kind}{words}")
