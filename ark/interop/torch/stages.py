"""Pipeline stages that the user sets by annotations (PopTorch's blocks): determines the stage of a
module's ops and parameters, and the processors of a stage. Called by iterate.py and optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import fx

import ark
from ark.errors import InvalidUsageError
from ark.runtime.session import device

_STAGE = "_ark_stage"


def block(module: torch.nn.Module, stage: int) -> torch.nn.Module:
    """Annotates a module as part of a stage of a pipeline (numbered from 0), and returns it.

    The device's processors are divided equally among the stages. A stage's ops, gradients and
    parameter updates run on its own processors, so the batches of one iteration (see Options) are
    in different stages at the same time. Raises InvalidUsageError unless the stage is an integer of
    at least 0.

    Examples:
        >>> layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        >>> for stage, layer in enumerate(layers):
        ...     layer = ark.torch.block(layer, stage)
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise InvalidUsageError(
            f"stage={stage!r} is not valid; it must be an integer of at least 0"
        )
    setattr(module, _STAGE, stage)
    return module


class Stages:
    """The stages of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        numbers = [getattr(m, _STAGE) for m in module.modules() if hasattr(m, _STAGE)]
        self._count = max(numbers, default=-1) + 1

    def of_node(self, node: fx.Node) -> AbstractContextManager[Any]:
        """The context in which the ops of a graph's node are built. It places them on the stage of
        the innermost annotated module that has the node.
        """
        stack = node.meta.get("nn_module_stack", {}).values()
        return self.within(self._first(path for path, _ in reversed(list(stack))))

    def of_parameters(self) -> dict[torch.Tensor, int]:
        """For each parameter, the stage of the innermost annotated module that contains it."""
        stage_of: dict[torch.Tensor, int] = {}
        for name, tensor in self._module.named_parameters():
            parts = name.split(".")[:-1]
            stage = self._first(".".join(parts[:n]) for n in range(len(parts), -1, -1))
            if stage is not None:
                stage_of[tensor] = stage
        return stage_of

    def _first(self, paths: Iterable[str]) -> int | None:
        """The stage of the first of the named modules that has a stage. None if none of them has
        one.
        """
        each = (self._at(path) for path in paths)
        return next((stage for stage in each if stage is not None), None)

    def _at(self, path: str) -> int | None:
        """The stage of the module with that name, or None."""
        owner: Any = self._module
        for part in [p for p in path.split(".") if p]:
            owner = getattr(owner, part, None)
        stage = getattr(owner, _STAGE, None)
        return None if stage is None else int(stage)

    def within(self, stage: int | None) -> AbstractContextManager[Any]:
        """The context that places ops on a stage's processors. With None, ops are not
        restricted.
        """
        if stage is None:
            return nullcontext()
        count, processors = self._count, device().machine.processors
        if count > processors:
            raise InvalidUsageError(
                f"the pipeline has {count} stages, but the device has {processors} processors"
            )
        span = [stage * processors // count, (stage + 1) * processors // count]
        return cast(AbstractContextManager[Any], ark.PlannerContext(processor_range=span))
