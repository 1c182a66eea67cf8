"""The ops that users call, such as ark.matmul. A call adds a node to the current model.

Each module defines a family of ops: the shape of the result, a NumPy reference that tests compare
with, and the lowering to tasks (in ark.lower.ops). Importing this package registers all ops.

Each docstring states the shapes and types that the op accepts. Inputs of other shapes or types
raise ModelError; other wrong arguments (not a tensor, an axis that does not exist, a size below 1)
raise InvalidUsageError.
"""

from inspect import isfunction

from ark.frontend.tensor import provided
from ark.lower.ops.communication import direct as direct
from ark.lower.ops.communication import overlapped as overlapped
from ark.lower.ops.communication import overlapped_gather as overlapped_gather
from ark.lower.ops.communication import programs as programs
from ark.lower.ops.communication import switched as switched
from ark.ops import adjusted as adjusted
from ark.ops import attention_gradient as attention_gradient
from ark.ops import decoder as decoder
from ark.ops import fusion as fusion
from ark.ops import parts as parts
from ark.ops import row_fusion as row_fusion
from ark.ops import sequences as sequences
from ark.ops import views
from ark.ops.activations import exp, gelu, relu, rsqrt, sigmoid, silu, sqrt
from ark.ops.attention import attention
from ark.ops.bitwise import (
    bitwise_and,
    bitwise_not,
    bitwise_or,
    bitwise_xor,
    shift_left,
    shift_right,
)
from ark.ops.caches import kv_append, kv_cache_slot
from ark.ops.checked import checked
from ark.ops.communication import channels as channels
from ark.ops.communication.ark_names import all_reduce_packet, all_reduce_prefill
from ark.ops.communication.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from ark.ops.communication.messages import recv, send, send_done
from ark.ops.custom import custom_op
from ark.ops.decoder import last_row, rope_kv, rotary_embedding
from ark.ops.elementwise import add, cast, constant, copy, div, mul, ones, sub, zeros
from ark.ops.experts import expert_linear, topk
from ark.ops.extremes import argmax, argmin
from ark.ops.images import batch_norm, group_norm, instance_norm, resize
from ark.ops.indexing import concat, expand, flip, pad, split, strided_slice, tile
from ark.ops.linear_algebra import linear, matmul
from ark.ops.logic import (
    atan2,
    equal,
    fmod,
    greater,
    greater_equal,
    hypot,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    maximum,
    minimum,
    mod,
    not_equal,
    pow,
)
from ark.ops.logsumexp import logsumexp
from ark.ops.lookup import gather, gather_elements, gather_nd, scatter_elements, scatter_nd
from ark.ops.losses import cross_entropy
from ark.ops.math import (
    ENTRIES,
    abs,
    ceil,
    cos,
    elu,
    erf,
    expm1,
    floor,
    gelu_erf,
    hard_sigmoid,
    hard_swish,
    isinf,
    isnan,
    leaky_relu,
    ln,
    log1p,
    log_sigmoid,
    mish,
    neg,
    reciprocal,
    round,
    selu,
    sign,
    sin,
    softsign,
    tanh,
)
from ark.ops.movement import embedding, rope, transpose
from ark.ops.norms import layernorm, log_softmax, rmsnorm, safe_softmax, softmax
from ark.ops.paged import paged_append, paged_attention
from ark.ops.pools import avg_pool, global_avg_pool, global_max_pool, max_pool
from ark.ops.quantize import dequantize, quantize, quantized_linear
from ark.ops.random import dropout, random_bits, random_normal, random_uniform
from ark.ops.reductions import mean, reduce_max, reduce_mean, reduce_min, reduce_prod, reduce_sum
from ark.ops.scans import cumprod, cumsum
from ark.ops.selection import clip, iota, one_hot, tril, triu, where
from ark.ops.tokens import TokenState, advance, embed, sample
from ark.ops.views import detach, identity, noop, parameter, placeholder, reshape, sharding, tensor
from ark.ops.windows import conv, conv_transpose

__all__ = [
    "TokenState",
    "abs",
    "add",
    "advance",
    "all_gather",
    "all_reduce",
    "all_reduce_packet",
    "all_reduce_prefill",
    "all_to_all",
    "argmax",
    "argmin",
    "atan2",
    "attention",
    "avg_pool",
    "batch_norm",
    "bitwise_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_xor",
    "broadcast",
    "cast",
    "ceil",
    "clip",
    "concat",
    "constant",
    "conv",
    "conv_transpose",
    "copy",
    "cos",
    "cross_entropy",
    "cumprod",
    "cumsum",
    "custom_op",
    "dequantize",
    "detach",
    "div",
    "dropout",
    "elu",
    "embed",
    "embedding",
    "equal",
    "erf",
    "exp",
    "expand",
    "expert_linear",
    "expm1",
    "flip",
    "floor",
    "fmod",
    "gather",
    "gather_elements",
    "gather_nd",
    "gelu",
    "gelu_erf",
    "global_avg_pool",
    "global_max_pool",
    "greater",
    "greater_equal",
    "group_norm",
    "hard_sigmoid",
    "hard_swish",
    "hypot",
    "identity",
    "instance_norm",
    "iota",
    "isinf",
    "isnan",
    "kv_append",
    "kv_cache_slot",
    "last_row",
    "layernorm",
    "leaky_relu",
    "less",
    "less_equal",
    "linear",
    "ln",
    "log1p",
    "log_sigmoid",
    "log_softmax",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "logsumexp",
    "matmul",
    "max_pool",
    "maximum",
    "mean",
    "minimum",
    "mish",
    "mod",
    "mul",
    "neg",
    "noop",
    "not_equal",
    "one_hot",
    "ones",
    "pad",
    "paged_append",
    "paged_attention",
    "parameter",
    "placeholder",
    "pow",
    "quantize",
    "quantized_linear",
    "random_bits",
    "random_normal",
    "random_uniform",
    "reciprocal",
    "recv",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_scatter",
    "reduce_sum",
    "relu",
    "reshape",
    "resize",
    "rmsnorm",
    "rope",
    "rope_kv",
    "rotary_embedding",
    "round",
    "rsqrt",
    "safe_softmax",
    "sample",
    "scatter_elements",
    "scatter_nd",
    "selu",
    "send",
    "send_done",
    "sharding",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "softsign",
    "split",
    "sqrt",
    "strided_slice",
    "sub",
    "tanh",
    "tensor",
    "tile",
    "topk",
    "transpose",
    "tril",
    "triu",
    "where",
    "zeros",
]

globals().update(ENTRIES)
__all__ += ENTRIES

for _name in __all__:
    if isfunction(globals()[_name]):
        globals()[_name] = checked(globals()[_name])

provided.update({name: globals()[name] for name in __all__})
provided["view"] = views.refer
provided["log"] = ln
