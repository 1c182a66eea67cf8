"""ark compiles a whole model into one persistent kernel per GPU; this is what users import."""

import importlib
import sys

from ark import errors as error
from ark import log
from ark import tasks as tasks  # registers the task kinds
from ark._version import __version__
from ark.api.aliases import install
from ark.api.core import Dims
from ark.api.init import init, set_rank, set_world_size
from ark.api.module import Module
from ark.api.planner import Plan, Planner, PlannerContext
from ark.api.profiler import Profiler
from ark.api.runtime import Runtime
from ark.api.state import load, save
from ark.errors import (
    BaseError,
    GpuError,
    InternalError,
    InvalidUsageError,
    ModelError,
    PlanError,
    SystemError,
    UnsupportedError,
)
from ark.frontend.model import Model, current_model, set_model, use_model
from ark.frontend.tensor import NullTensor, Parameter, Tensor
from ark.ir.dtype import DataType, bf16, byte, fp16, fp32, int8, int32, uint8, uint32
from ark.ops import (
    TokenState,
    add,
    advance,
    all_gather,
    all_reduce,
    all_reduce_packet,
    all_reduce_prefill,
    all_to_all,
    argmax,
    attention,
    broadcast,
    cast,
    constant,
    copy,
    div,
    embed,
    embedding,
    exp,
    expert_linear,
    gelu,
    identity,
    kv_append,
    kv_cache_slot,
    layernorm,
    linear,
    matmul,
    mean,
    mul,
    noop,
    ones,
    parameter,
    placeholder,
    recv,
    reduce_max,
    reduce_mean,
    reduce_scatter,
    reduce_sum,
    relu,
    reshape,
    rmsnorm,
    rope,
    rope_kv,
    rotary_embedding,
    rsqrt,
    sample,
    send,
    send_done,
    sharding,
    sigmoid,
    silu,
    softmax,
    sqrt,
    sub,
    swiglu,
    tensor,
    topk,
    transpose,
    zeros,
)
from ark.runtime.launch import launch


def version() -> str:
    """The version of ark."""
    return __version__


# What the interface names and ark does not have yet: asking for one says so.
_NOT_BUILT = (
    "FP8_E4M3",
    "FP8_E5M2",
    "concat",
    "conv",
    "gather",
    "get",
    "put",
    "sampling",
    "signal",
    "wait",
    "where",
)


def __getattr__(name: str) -> object:
    """profiler and comm load when asked for; what is not built raises UnsupportedError."""
    if name in ("comm", "profiler"):
        return importlib.import_module(f"ark.{name}")
    if name in _NOT_BUILT:
        raise UnsupportedError(f"ark.{name} is not built yet")
    raise AttributeError(f"module 'ark' has no attribute {name!r}")


__all__ = [
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
    "SystemError",
    "Tensor",
    "TokenState",
    "UnsupportedError",
    "__version__",
    "add",
    "advance",
    "all_gather",
    "all_reduce",
    "all_reduce_packet",
    "all_reduce_prefill",
    "all_to_all",
    "argmax",
    "attention",
    "bf16",
    "broadcast",
    "byte",
    "cast",
    "constant",
    "copy",
    "current_model",
    "div",
    "embed",
    "embedding",
    "error",
    "exp",
    "expert_linear",
    "fp16",
    "fp32",
    "gelu",
    "identity",
    "init",
    "int8",
    "int32",
    "kv_append",
    "kv_cache_slot",
    "launch",
    "layernorm",
    "linear",
    "load",
    "log",
    "matmul",
    "mean",
    "mul",
    "noop",
    "ones",
    "parameter",
    "placeholder",
    "recv",
    "reduce_max",
    "reduce_mean",
    "reduce_scatter",
    "reduce_sum",
    "relu",
    "reshape",
    "rmsnorm",
    "rope",
    "rope_kv",
    "rotary_embedding",
    "rsqrt",
    "sample",
    "save",
    "send",
    "send_done",
    "set_model",
    "set_rank",
    "set_world_size",
    "sharding",
    "sigmoid",
    "silu",
    "softmax",
    "sqrt",
    "sub",
    "swiglu",
    "tensor",
    "topk",
    "transpose",
    "uint8",
    "uint32",
    "use_model",
    "version",
    "zeros",
]

install(sys.modules[__name__])
