"""The ops that users call. Each family's module has, for every op, its shape rule, its NumPy
reference and how it becomes tile tasks; importing this package registers them all.
"""

from ark.frontend.tensor import provided
from ark.ops import decoder as decoder
from ark.ops import programs as programs
from ark.ops import views
from ark.ops.attention import attention, kv_append, kv_cache_slot
from ark.ops.collectives import (
    all_gather,
    all_reduce,
    all_reduce_packet,
    all_reduce_prefill,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from ark.ops.communication import recv, send, send_done
from ark.ops.decoder import rope_kv, rotary_embedding
from ark.ops.elementwise import (
    add,
    cast,
    constant,
    copy,
    div,
    exp,
    gelu,
    mul,
    ones,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    sub,
    swiglu,
    zeros,
)
from ark.ops.experts import expert_linear, topk
from ark.ops.linear_algebra import linear, matmul
from ark.ops.movement import embedding, rope, transpose
from ark.ops.reductions import (
    argmax,
    layernorm,
    mean,
    reduce_max,
    reduce_mean,
    reduce_sum,
    rmsnorm,
    softmax,
)
from ark.ops.tokens import TokenState, advance, embed, sample
from ark.ops.views import identity, noop, parameter, placeholder, reshape, sharding, tensor

__all__ = [
    "TokenState",
    "add",
    "advance",
    "all_gather",
    "all_reduce",
    "all_reduce_packet",
    "all_reduce_prefill",
    "all_to_all",
    "argmax",
    "attention",
    "broadcast",
    "cast",
    "constant",
    "copy",
    "div",
    "embed",
    "embedding",
    "exp",
    "expert_linear",
    "gelu",
    "identity",
    "kv_append",
    "kv_cache_slot",
    "layernorm",
    "linear",
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
    "send",
    "send_done",
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
    "zeros",
]

provided.update({name: globals()[name] for name in __all__})
provided["view"] = views.refer
