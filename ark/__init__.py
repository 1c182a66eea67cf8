"""ark compiles a whole model into one persistent kernel per GPU; this is what users import."""

__version__ = "0.1.0"

from ark import errors as error
from ark import log
from ark.core import Dims
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
from ark.init import init, set_rank, set_world_size
from ark.ir.dtype import DataType, bf16, byte, fp16, fp32, int8, int32, uint8, uint32
from ark.model import Model, current_model, set_model, use_model
from ark.module import Module
from ark.ops import (
    TokenState,
    add,
    advance,
    all_gather,
    all_reduce,
    all_reduce_packet,
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
from ark.planner import Plan, Planner, PlannerContext
from ark.runtime.launch import launch
from ark.runtime.runtime import Runtime
from ark.serialize import load, save
from ark.tensor import NullTensor, Parameter, Tensor


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
    """profiler and executor load when asked for; what is not built raises UnsupportedError."""
    import importlib

    if name in ("profiler", "executor"):
        return importlib.import_module(f"ark.{name}")
    if name == "Profiler":
        return importlib.import_module("ark.profiler").Profiler
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
