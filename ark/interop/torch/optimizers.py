"""Builds torch's optimizers as graphs of ark (ark.optim), for ark.training_model. Called by
iterate.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

import ark
from ark.errors import InvalidUsageError, UnsupportedError
from ark.interop.torch.stages import Stages
from ark.interop.torch.values import Value, input_of


class Rates:
    """Reads the settings of a torch optimizer for a kernel. The learning rates are read at every
    call; every other setting must keep the value that it had when the kernel was compiled. The
    optimizer's state (moments) is stored by the kernel, not by the torch object.
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
        self._trained = self.parameters()
        self._settings = self._present()
        self.check()

    def _present(self) -> list[dict[str, Any]]:
        """For each parameter group, the present values of the settings that are constants in a
        compiled kernel.
        """
        settings = [dict(group) for group in self._optimizer.param_groups]
        for group in settings:
            del group["lr"], group["params"]
        return settings

    def check(self) -> None:
        """Raises InvalidUsageError if the optimizer has changed since the kernel was compiled, or
        has state or hooks that a kernel does not see.
        """
        present = self._present()
        trained = self.parameters()
        same = len(trained) == len(self._trained) and all(map(operator.is_, trained, self._trained))
        if not same or len(present) != len(self._settings):
            raise InvalidUsageError(
                "the optimizer's groups or their parameters that require gradients have changed; "
                "create another model"
            )
        for before, now in zip(self._settings, present, strict=True):
            for name, value in now.items():
                if value != before.get(name):
                    raise InvalidUsageError(
                        f"the optimizer's {name} was {before.get(name)} and is {value}; only lr "
                        "may change between calls; create another model"
                    )
        for state in self._optimizer.state.values():
            names = [name for name, value in state.items() if value is not None]
            if names:
                raise InvalidUsageError(
                    f"the optimizer has state of torch's steps or of a checkpoint ("
                    f"{', '.join(names)}), which a kernel does not read; use a new optimizer"
                )
        hooks: list[Any] = [
            self._optimizer._optimizer_step_pre_hooks,
            self._optimizer._optimizer_step_post_hooks,
        ]
        for parameter in trained:
            hooks += [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]
        if any(hooks):
            raise UnsupportedError(
                "hooks of an optimizer or of its parameters' gradients are not supported; remove "
                "them"
            )

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
        """Adds the computation of the gradients and the parameter update to the current model.
        Returns the learning rates as values of the model; they are inputs of the kernel.

        total: the sum of this rank's losses. count: the number of losses on all ranks; the
        gradients are those of the mean of all losses. stages: the pipeline stages of the module; a
        parameter's update runs on the processors of its stage.
        """
        groups = [
            [p for p in group["params"] if p in values and p.requires_grad]
            for group in self._optimizer.param_groups
        ]
        if not any(groups):
            raise InvalidUsageError("the optimizer has none of the module's parameters")
        mean = ark.mul(total, 1.0 / count)
        inputs = [values[p] for g in groups for p in g]
        gradients = ark.grad(mean, inputs, allow_unused=True)
        assert isinstance(gradients, list)
        if not any(isinstance(g, ark.Tensor) for g in gradients):
            raise InvalidUsageError("the loss depends on none of the optimizer's parameters")
        graph = ark.Model.get_model().graph
        if graph.world_size > 1:
            gradients = [
                None if g is None else ark.all_reduce(g, graph.rank, graph.world_size)
                for g in gradients
            ]
        remaining = iter(gradients)
        rates, stage_of = [], stages.of_parameters()
        for group, parameters in zip(self._optimizer.param_groups, groups, strict=True):
            rates.append(input_of((1,), torch.float32))
            by_stage: dict[int | None, list[tuple[ark.Tensor, ark.Tensor]]] = {}
            for parameter in parameters:
                gradient = next(remaining)
                if gradient is not None:  # torch does not step parameters without a gradient
                    pair = values[parameter], gradient
                    by_stage.setdefault(stage_of.get(parameter), []).append(pair)
            for stage, pairs in by_stage.items():
                with stages.within(stage):
                    optimizer = self._new_optimizer([p for p, _ in pairs], rates[-1].tensor, group)
                    optimizer.step([g for _, g in pairs])
        return rates

    def _new_optimizer(
        self, parameters: list[ark.Tensor], rate: ark.Tensor, group: dict[str, Any]
    ) -> Any:
        decay = float(group["weight_decay"])
        if self._name == "SGD":
            momentum, nesterov = float(group["momentum"]), bool(group["nesterov"])
            return ark.optim.SGD(parameters, rate, momentum, decay, nesterov)
        first, second = group["betas"]
        coupled = self._name == "Adam" and not group.get("decoupled_weight_decay")
        kind: type[ark.optim.Adam] = ark.optim.Adam if coupled else ark.optim.AdamW
        return kind(parameters, rate, (float(first), float(second)), float(group["eps"]), decay)
