"""Builds torch's optimizers as graphs of ark (ark.optim), for ark.training_model. Called by
iterate.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.interop.torch.stages import Stages
from ark.interop.torch.values import Value, input_of


class Rates:
    """An optimizer of torch. A kernel reads its learning rates at every call. The state (moments)
    is stored by the kernel and not by the optimizer.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._name = type(optimizer).__name__
        if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            raise UnsupportedError(
                f"the optimizer {self._name} is not supported; use torch's SGD, Adam or AdamW"
            )
        for group in optimizer.param_groups:
            for setting in ("dampening", "amsgrad", "maximize"):
                if group.get(setting):
                    raise UnsupportedError(f"{self._name} with {setting} is not supported")

    def parameters(self) -> list[torch.Tensor]:
        """The tensors that the optimizer trains."""
        groups = self._optimizer.param_groups
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def now(self, where: torch.device) -> list[torch.Tensor]:
        """The present learning rates, one for each parameter group."""
        return [
            torch.full((1,), float(group["lr"]), device=where)
            for group in self._optimizer.param_groups
        ]

    def step(
        self,
        total: ark.Tensor,
        count: int,
        values: Mapping[torch.Tensor, ark.Tensor],
        stages: Stages,
    ) -> list[Value]:
        """Adds gradients and update to the current model; returns the learning rates' values.

        total: the sum of this rank's losses. count: the number of losses of all ranks; gradients
        are those of their mean. stages: the stages of the module; a parameter's update runs on the
        processors of its stage.
        """
        groups = [
            [p for p in group["params"] if p in values and p.requires_grad]
            for group in self._optimizer.param_groups
        ]
        if not any(groups):
            raise InvalidUsageError("the optimizer has none of the module's parameters")
        reduced = ark.grad(ark.mul(total, 1.0 / count), [values[p] for g in groups for p in g])
        graph = ark.Model.get_model().graph
        if graph.world_size > 1:
            reduced = [ark.all_reduce(g, graph.rank, graph.world_size) for g in reduced]
        gradients = iter(reduced)
        rates, stage_of = [], stages.of_parameters()
        for group, parameters in zip(self._optimizer.param_groups, groups, strict=True):
            rates.append(input_of((1,), torch.float32))
            by_stage: dict[int | None, list[tuple[ark.Tensor, ark.Tensor]]] = {}
            for parameter in parameters:
                pair = values[parameter], next(gradients)
                by_stage.setdefault(stage_of.get(parameter), []).append(pair)
            for stage, pairs in by_stage.items():
                with stages.within(stage):
                    optimizer = self._made([p for p, _ in pairs], rates[-1].tensor, group)
                    optimizer.step([g for _, g in pairs])
        return rates

    def _made(self, parameters: list[ark.Tensor], rate: ark.Tensor, group: dict[str, Any]) -> Any:
        decay = float(group["weight_decay"])
        if self._name == "SGD":
            momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
            return ark.optim.SGD(parameters, rate, momentum, decay, nesterov)
        first, second = group["betas"]
        coupled = self._name == "Adam" and not group.get("decoupled_weight_decay")
        kind: type[ark.optim.Adam] = ark.optim.Adam if coupled else ark.optim.AdamW
        return kind(parameters, rate, (float(first), float(second)), float(group["eps"]), decay)
