"""A torch module in eval mode or in training mode, whose calls run many iterations in one launch.
Called by ark.interop.
"""

from __future__ import annotations

import torch

from ark.errors import InvalidUsageError
from ark.interop.torch.iterate import Executor
from ark.interop.torch.options import Options


def inference_model(module: torch.nn.Module, options: Options | None = None) -> Executor:
    """Wraps the module in eval mode, as `ark.inference_model`.

    If it is in eval mode already, its submodules keep their modes. Each call of the result is one
    launch of options.device_iterations iterations.

    Examples:
        >>> options = ark.torch.Options(device_iterations=2, output_mode="all")
        >>> from ark.interop.torch import inference_model
        >>> inference_model(torch.nn.ReLU(), options)(torch.tensor([[-1.0], [2.0]]))
        tensor([[0.],
                [2.]])
    """
    return Executor(module, options)


def training_model(
    module: torch.nn.Module, options: Options | None, optimizer: torch.optim.Optimizer
) -> Executor:
    """The module in training mode, whose last result must be the loss, as `ark.training_model`.

    Parts of a module in this mode keep their own modes. Each iteration of a call is a step of the
    optimizer: SGD, Adam or AdamW of torch, whose learning rates are read at every call. Raises
    InvalidUsageError for another optimizer.

    Examples:
        >>> class Loss(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x).mean()
        >>> loss = Loss(1, 1, bias=False)
        >>> _ = loss.weight.data.fill_(1.0)
        >>> sgd = torch.optim.SGD(loss.parameters(), lr=0.5)
        >>> from ark.interop.torch import training_model
        >>> step = training_model(loss, ark.torch.Options(device_iterations=2), sgd)
        >>> _ = step(torch.ones(2, 1))  # two steps in one launch
        >>> loss.weight.data
        tensor([[0.]])
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidUsageError(
            f"optimizer has type {type(optimizer).__name__}; expected a torch optimizer over "
            "the module's parameters"
        )
    return Executor(module, options, optimizer)
