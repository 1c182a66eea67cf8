"""Pipeline stages by annotation (PopTorch's blocks): which stage a module's ops and parameters
belong to, and the processors that a stage has. Called by iterate.py and optimizers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import fx

import ark
from ark.api.session import device
from ark.errors import InvalidUsageError

_STAGE = "_ark_stage"


def block(module: torch.nn.Module, stage: int) -> torch.nn.Module:
    """Annotates a module as part of a pipeline's stage, from 0, and returns it.

    The device's processors are dealt to the stages in equal parts, and a stage's ops, gradients and
    updates of parameters stay on its own; batches of one iteration (options) then pass through the
    stages side by side.
    """
    if isinstance(stage, bool) or not isinstance(stage, int) or stage < 0:
        raise InvalidUsageError(f"a pipeline stage is {stage!r}; it must be a number from 0")
    setattr(module, _STAGE, stage)
    return module


class Stages:
    """Those of a module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        found = [getattr(m, _STAGE) for m in module.modules() if hasattr(m, _STAGE)]
        self._count = max(found, default=-1) + 1

    def of_node(self, node: fx.Node) -> AbstractContextManager[Any]:
        """Where the ops of an exported graph's node are placed: by the innermost annotated module
        that it belongs to.
        """
        stack = node.meta.get("nn_module_stack", {}).values()
        return self.within(self._first(path for path, _ in reversed(list(stack))))

    def of_parameters(self) -> dict[torch.Tensor, int]:
        """By parameter, the stage of the innermost annotated module that has it."""
        found: dict[torch.Tensor, int] = {}
        for name, tensor in self._module.named_parameters():
            parts = name.split(".")[:-1]
            stage = self._first(".".join(parts[:n]) for n in range(len(parts), -1, -1))
            if stage is not None:
                found[tensor] = stage
        return found

    def _first(self, paths: Iterable[str]) -> int | None:
        """What the first of these modules that is annotated is annotated with."""
        each = (self._at(path) for path in paths)
        return next((stage for stage in each if stage is not None), None)

    def _at(self, path: str) -> int | None:
        """What the module of that name is annotated with, if it is."""
        owner: Any = self._module
        for part in [p for p in path.split(".") if p]:
            owner = getattr(owner, part, None)
        stage = getattr(owner, _STAGE, None)
        return None if stage is None else int(stage)

    def within(self, stage: int | None) -> AbstractContextManager[Any]:
        """Where a stage's ops are placed; those of none lie anywhere."""
        if stage is None:
            return nullcontext()
        count, processors = self._count, device().machine.processors
        if count > processors:
            raise InvalidUsageError(
                f"the pipeline has {count} stages, but the device has {processors} processors"
            )
        span = [stage * processors // count, (stage + 1) * processors // count]
        return cast(AbstractContextManager[Any], ark.PlannerContext(processor_range=span))
