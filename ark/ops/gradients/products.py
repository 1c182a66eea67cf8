"""The gradient rules of matmuls, rotary embeddings and attention."""

from __future__ import annotations

import math

from ark.frontend.tensor import Tensor
from ark.ir.attributes import AttentionAttributes, MatmulAttributes, RotaryAttributes
from ark.ir.dtype import fp32
from ark.ops.decoder import rotary_embedding
from ark.ops.elementwise import cast, mul, sub
from ark.ops.gradients.convolutions import convolution_gradients
from ark.ops.gradients.elementwise import computed, unbroadcast
from ark.ops.gradients.table import Call, Gradients, refuse, rule
from ark.ops.linear_algebra import matmul
from ark.ops.math import neg
from ark.ops.movement import transpose
from ark.ops.norms import softmax
from ark.ops.reductions import reduce_sum
from ark.ops.views import reshape
from ark.tasks.expression import Tree, index, leaf, number


def _as(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor if tensor.ir.dtype == like.ir.dtype else cast(tensor, like.ir.dtype)


@rule("matmul")
def _matmul(call: Call) -> Gradients:
    """The gradients of C = A B. They are dC B^T for A and A^T dC for B, each transposed if the
    operand was. If A and B have one 16-bit type and C is fp32, dC is rounded to the 16-bit type, as
    in torch, because products of 16-bit operands run on matrix units. Convolutions have a rule of
    their own.
    """
    given = call.gradient()
    first, second = (value.dtype for value in call.node.inputs[:2])
    if first == second and first.bits == 16:
        given = given if given.ir.dtype == first else cast(given, first)
    convolved = convolution_gradients(call, given)
    if convolved is not None:
        return convolved
    attributes = MatmulAttributes.from_node(call.attrs)
    (transpose_a, transpose_b), tf32 = attributes.transposes, attributes.tf32
    left = right = None
    if call.wanted[0]:
        b = _as(call.input(1), given)
        if transpose_a:
            left = matmul(b, given, transpose_input=transpose_b, transpose_other=True, tf32=tf32)
        else:
            left = matmul(given, b, transpose_other=not transpose_b, tf32=tf32)
        left = unbroadcast(left, call.shape(0), call.node.inputs[0].dtype)
    if call.wanted[1]:
        a, back = _as(call.input(0), given), given
        shape = call.shape(1)
        if math.prod(shape[:-2]) == 1 and not transpose_a:  # one matmul, which sums over all rows
            a = reshape(a, [-1, a.ir.shape[-1]])
            back = reshape(given, [-1, given.ir.shape[-1]])
        if transpose_b:
            right = matmul(back, a, transpose_input=True, transpose_other=transpose_a, tf32=tf32)
        else:
            right = matmul(a, back, transpose_input=not transpose_a, tf32=tf32)
        right = unbroadcast(right, shape, call.node.inputs[1].dtype)
    return [left, right]


@rule("rotary_embedding")
def _rotary(call: Call) -> Gradients:
    """The gradient of a rotary embedding: the given gradient rotated by the negative angle."""
    if call.wanted[2]:
        raise refuse(call, "the frequencies")
    back = neg(call.input(2))
    rotated = rotary_embedding(
        call.gradient(),
        call.input(1),
        back,
        interleaved=call.node.read(RotaryAttributes).interleaved,
    )
    return [rotated, None, None]


@rule("attention")
def _attention(call: Call) -> Gradients:
    """The gradients of attention. Recomputes the attention weights and follows Dao et al. 2022,
    appendix B.2, in fp32.
    """
    how = call.node.read(AttentionAttributes)
    if not how.plain:
        kinds = "not causal, windowed, capped, masked, with sinks or without a position"
        raise refuse(call, f"the inputs of attention that is {kinds}")
    heads, width, scale = how.heads, how.head_dim, how.scale
    kv_heads = call.shape(1)[0]
    rows, group = call.shape(0)[0], heads // kv_heads

    def by_head(flat: Tensor) -> Tensor:
        """A tensor (rows, heads * width) rearranged to (kv_heads, group * rows, width) in fp32."""
        split = transpose(reshape(flat, [rows, kv_heads, group, width]), [1, 2, 0, 3])
        return wide(reshape(split, [kv_heads, group * rows, width]))

    query, key, value = by_head(call.input(0)), wide(call.input(1)), wide(call.input(2))
    given = by_head(call.gradient())
    last = ["add", leaf(1), ["mod", index(-2), number(rows)]]
    seen: Tree = ["less_equal", index(-1), last]
    masked: Tree = ["where", seen, ["mul", leaf(0), number(scale)], number(-1e30)]
    scores = matmul(query, key, transpose_other=True)
    weights = softmax(computed(masked, [scores, call.input(3)], scores.ir.shape, fp32))
    gradients: list[Tensor | None] = [None] * 4
    if call.wanted[2]:
        gradients[2] = call.fitted(matmul(weights, given, transpose_input=True), 2)
    if call.wanted[0] or call.wanted[1]:
        back = matmul(given, value, transpose_other=True)
        mean = reduce_sum(mul(back, weights), -1)
        slope = mul(mul(weights, sub(back, mean)), scale)
        if call.wanted[0]:
            grouped = reshape(matmul(slope, key), [kv_heads, group, rows, width])
            flat = reshape(transpose(grouped, [2, 0, 1, 3]), call.shape(0))
            gradients[0] = call.fitted(flat, 0)
        if call.wanted[1]:
            gradients[1] = call.fitted(matmul(slope, query, transpose_input=True), 1)
    return gradients


def wide(tensor: Tensor) -> Tensor:
    """The tensor in fp32."""
    return tensor if tensor.ir.dtype == fp32 else cast(tensor, fp32)
