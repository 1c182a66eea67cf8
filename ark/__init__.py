"""ark compiles a whole model into one persistent kernel per GPU; this is what users import."""

from ark import _interrupt as _interrupt  # before all that takes time to load

# isort: split
import builtins
import importlib
import sys

from ark import errors as error
from ark import log, ops
from ark import tasks as tasks  # registers the task kinds
from ark._version import __version__
from ark.api.aliases import install
from ark.api.context import PlannerContext
from ark.api.core import Dims
from ark.api.init import init, set_rank, set_world_size
from ark.api.module import Module
from ark.api.plan import Plan
from ark.api.planner import Planner
from ark.api.profiler import Profiler
from ark.api.state import load, save
from ark.errors import (
    BaseError,
    GpuError,
    InternalError,
    InvalidUsageError,
    ModelError,
    PlanError,
    UnsupportedError,
)
from ark.errors import SystemError as SystemError
from ark.frontend.model import Model, current_model, set_model, use_model
from ark.frontend.tensor import NullTensor, Parameter, Tensor
from ark.gradients import grad, optim
from ark.ir.dtype import (
    DataType,
    bf16,
    bool_,
    byte,
    fp4,
    fp8_e4m3,
    fp8_e5m2,
    fp16,
    fp32,
    int4,
    int8,
    int32,
    int64,
    uint4,
    uint8,
    uint32,
)
from ark.ops import *  # noqa: F403
from ark.runtime import known as _known  # noqa: F401  registers itself at ark.runtime.toolchain
from ark.runtime.launch import launch
from ark.runtime.runtime import Runtime


def version() -> str:
    """The version of ark.

    Example:
        >>> len(ark.version().split("."))
        3
    """
    return __version__


# ARK's names of them.
FP8_E4M3, FP8_E5M2 = fp8_e4m3, fp8_e5m2
bool = bool_

# What the interface names and ark does not have yet: asking for one says so.
_NOT_BUILT = (
    "get",
    "put",
    "sampling",
    "signal",
    "wait",
)


# Loaded on first use, so that importing ark takes no longer.
_LAZY = {
    "LLM": "ark.serving.llm",
    "SamplingParams": "ark.models.sampling",
    "StructuredOutputsParams": "ark.models.structured",
}


class _NotBuilt(UnsupportedError, AttributeError):
    """Raised for a name that is not built, which `hasattr` sees as no such name."""


def __getattr__(name: str) -> object:
    """Loads packages of ark on first use; UnsupportedError for names that are not built."""
    if name in ("comm", "distributed", "parallel", "profiler"):
        return importlib.import_module(f"ark.{name}")
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    if name == "parallelize":
        return importlib.import_module("ark.parallel").parallelize
    if name in ("from_onnx", "from_torch", "inference_model", "training_model"):
        return getattr(importlib.import_module("ark.interop"), name)
    if name in _NOT_BUILT:
        raise _NotBuilt(f"ark.{name} is not built yet")
    raise AttributeError(f"module 'ark' has no attribute {name!r}")


__all__ = [
    "FP8_E4M3",
    "FP8_E5M2",
    "BaseError",
    "DataType",
    "Dims",
    "GpuError",
    "InternalError",
    "InvalidUsageError",
    "Model",
    "ModelError",
    "Module",
    "NullTensor",
    "Parameter",
    "Plan",
    "PlanError",
    "Planner",
    "PlannerContext",
    "Profiler",
    "Runtime",
    "Tensor",
    "UnsupportedError",
    "__version__",
    "bf16",
    "byte",
    "current_model",
    "error",
    "fp4",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp16",
    "fp32",
    "grad",
    "init",
    "int4",
    "int8",
    "int32",
    "int64",
    "launch",
    "load",
    "log",
    "optim",
    "save",
    "set_model",
    "set_rank",
    "set_world_size",
    "uint4",
    "uint8",
    "uint32",
    "use_model",
    "version",
]
# `from ark import *` leaves Python's own names alone: ark.bool, ark.SystemError and ops such as
# ark.abs are reached by `ark.` alone.
__all__ += [name for name in ops.__all__ if not hasattr(builtins, name)]

install(sys.modules[__name__])
