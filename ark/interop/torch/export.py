"""torch.export as ark uses it: one module at a time, and what it cannot follow is said in words.

Called by ark.interop.torch.compile and ark.interop.torch.iterate.
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

# torch has one state of tracing a process, whatever thread is in it.
TRACING = threading.RLock()


def decompositions() -> dict[Any, Any]:
    """torch's decompositions into core ATen operators, of those that ark does not have itself."""
    return dict(_found())


@cache
def _found() -> dict[Any, Any]:
    """The same, which takes torch half a second."""
    found = {op: f for op, f in core_aten_decompositions().items() if name_of(op) not in TABLE}
    aten = torch.ops.aten
    others = [aten._native_batch_norm_legit_functional, aten.linalg_vector_norm]
    return {**found, **get_decompositions(others)}


def check_module(module: Any) -> torch.nn.Module:
    """The module itself; InvalidUsageError for what is none."""
    if not isinstance(module, torch.nn.Module):
        raise InvalidUsageError(
            f"a torch.nn.Module is expected, got {type(module).__name__}; wrap a function in one"
        )
    return module


def export(
    module: torch.nn.Module, example: Sequence[Any], training: bool, dynamic_shapes: Any = None
) -> Any:
    """The module exported for `example` and decomposed, in the mode that is asked for.

    Its own mode is as before afterwards. InvalidUsageError where torch cannot follow the module for
    these inputs, with torch's words.
    """
    check_module(module)
    if not isinstance(example, (tuple, list)):
        raise InvalidUsageError(
            f"the example is {type(example).__name__}; give a tuple of what the module is called "
            "with, (x,) for one tensor"
        )
    with TRACING, torch.set_grad_enabled(training):
        was = module.training
        try:
            made = torch.export.export(
                module.train(training), tuple(example), dynamic_shapes=dynamic_shapes
            )
            return made.run_decompositions(decompositions())
        except BaseError:
            raise
        except Exception as error:  # whatever torch and the module's own code raise
            words = str(error).strip().split("\n")[0][:300]
            raise InvalidUsageError(
                "torch.export cannot follow the module for these inputs: "
                f"{type(error).__name__}: {words}"
            ) from error
        finally:
            module.train(was)
