"""Exports modules with torch.export, one at a time, with a clear error if torch cannot export a
module. Called by ark.interop.torch.compile and ark.interop.torch.iterate.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from ark.errors import BaseError, InvalidUsageError
from ark.interop.torch.graph import name_of
from ark.interop.torch.values import TABLE

MESSAGE_LENGTH = 500  # characters of torch's message; the reason often follows its first line

# torch has one tracing state per process, shared by all threads.
TRACING = threading.RLock()


def decompositions() -> dict[Any, Any]:
    """torch's decompositions into core ATen operators, without those of operators that ark has
    itself.
    """
    return dict(_decompositions())


@cache
def _decompositions() -> dict[Any, Any]:
    """Computes the decompositions, which takes torch half a second."""
    table = {op: f for op, f in core_aten_decompositions().items() if name_of(op) not in TABLE}
    aten = torch.ops.aten
    return {**table, **get_decompositions([aten.linalg_vector_norm])}


def check_module(module: Any) -> torch.nn.Module:
    """Returns the module. Raises InvalidUsageError if it is not a torch module."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidUsageError(
            f"expected a torch.nn.Module, got {type(module).__name__}; wrap a function in one"
        )
    return module


def export(
    module: torch.nn.Module, example: Sequence[Any], training: bool, dynamic_shapes: Any = None
) -> Any:
    """Exports and decomposes the module for `example`, in training or eval mode as requested.

    A module that is in this mode already keeps the modes of its parts, such as a batch norm in eval
    mode during training. All modes are restored afterwards. Raises InvalidUsageError with torch's
    message if torch cannot export the module for these inputs.
    """
    check_module(module)
    if not isinstance(example, (tuple, list)):
        raise InvalidUsageError(
            f"the example is a {type(example).__name__}; pass a tuple of the module's "
            "arguments, (x,) for one tensor"
        )
    with TRACING, torch.set_grad_enabled(training):
        modes = {part: part.training for part in module.modules()}
        if module.training != training:
            module.train(training)
        try:
            exported = torch.export.export(module, tuple(example), dynamic_shapes=dynamic_shapes)
            return exported.run_decompositions(decompositions())
        except BaseError:
            raise
        except Exception as error:  # torch and the module's own code may raise any error
            words = " ".join(str(error).split()).split(" The error above occurred")[0]
            raise InvalidUsageError(
                "torch.export cannot follow the module for these inputs: "
                f"{type(error).__name__}: {words[:MESSAGE_LENGTH]}"
            ) from error
        finally:
            for part, mode in modes.items():
                part.training = mode
