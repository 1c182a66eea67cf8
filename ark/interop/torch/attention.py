"""Converts ATen operators for attention, and for whole layers with attention that torch has as one
operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import ark
from ark.interop.torch.products import products_as_tf32
from ark.interop.torch.values import Call, Value, cast, operator, refuse


def _repeated(heads: ark.Tensor, query: ark.Tensor) -> ark.Tensor:
    """Repeats each head of keys or values, (..., kv_heads, rows, width), for all query heads that
    use it.
    """
    *lead, count, rows, width = heads.ir.shape
    group, rest = divmod(query.ir.shape[-3], count)
    if rest:
        raise refuse(f"attention of {query.ir.shape[-3]} query heads with {count} heads of keys")
    alone = ark.reshape(heads, [*lead, count, 1, rows, width])
    each = ark.expand(alone, [*lead, count, group, rows, width])
    return ark.reshape(each, [*lead, count * group, rows, width])


def _attention(
    query: Value,
    key: Value,
    value: Value,
    mask: Any,
    is_causal: bool,
    scale: float | None,
    grouped: bool = False,
) -> Any:
    """Scaled dot-product attention, expressed by single ops: products, softmax and mask. On
    machines with matrix units, lowering replaces these ops by one
    (ark.lower.rewrite.fuse_attention). grouped: True if several query heads share one head of keys
    and values.
    """
    q, k, v = query.tensor, key.tensor, value.tensor
    if grouped and len(q.ir.shape) > 2:
        k, v = (_repeated(t, q) if t.ir.shape[-3] != q.ir.shape[-3] else t for t in (k, v))
    if q.ir.shape[:-2] != k.ir.shape[:-2]:
        raise refuse("attention whose queries and keys differ in heads")
    scale = q.ir.shape[-1] ** -0.5 if scale is None else scale
    product = ark.matmul(
        q, k, transpose_other=True, dtype=ark.fp32, tf32=products_as_tf32(query)
    )  # in 16 bits scores would be rounded, and fp16 could overflow
    scores = ark.mul(product, float(scale))
    if is_causal:
        shape = list(scores.ir.shape)
        rows, columns = (ark.iota(shape[-2:], d, ark.int32) for d in (0, 1))
        scores = ark.where(ark.less_equal(columns, rows), scores, float("-inf"))
    if mask is not None and mask.tensor.ir.dtype == ark.bool:
        scores = ark.where(mask.tensor, scores, float("-inf"))
    elif mask is not None:
        scores = ark.add(scores, cast(mask, ark.fp32))
    weights = ark.softmax(scores) if mask is None else ark.safe_softmax(scores)
    if v.ir.dtype != ark.fp32:
        weights = ark.cast(weights, v.ir.dtype)
    return ark.matmul(weights, v, tf32=products_as_tf32(query))


def _operator(places: Sequence[str], several: bool) -> Callable[..., Any]:
    """Converts one of torch's attention operators. places: the names of its arguments after the
    value. several: True for a kernel with further results, such as the logsumexp, which only
    training needs. Raises UnsupportedError if one of them is used, and for dropout.
    """

    def run(call: Call, query: Value, key: Value, value: Value, *given: Any, **more: Any) -> Any:
        named = {**dict(zip(places, given)), **more}  # noqa: B905  the last ones may be left out
        others = len(call.used) - 1 if several else 0
        if named.get("dropout_p") or any(call.wants(1 + place) for place in range(others)):
            raise refuse("attention with dropout or its logsumexp")
        mask = named.get("attn_bias", named.get("attn_mask"))
        how = (named.get("is_causal", False), named.get("scale"), named.get("enable_gqa", False))
        result = _attention(query, key, value, mask, *how)
        return [result, *[None] * others] if several else result

    return run


_BIASED = ("attn_bias", "compute_log_sumexp", "dropout_p", "is_causal")
for _name, _places in {
    "_flash_attention_for_cpu": ("dropout_p", "is_causal"),
    "_flash_attention": ("dropout_p", "is_causal"),
    "_efficient_attention": _BIASED,
    "_cudnn_attention": _BIASED,
}.items():
    operator(f"_scaled_dot_product{_name}.default")(_operator(_places, several=True))
for _name, _places in {
    "scaled_dot_product_attention": ("attn_mask", "dropout_p", "is_causal"),
    "ark.attention": ("attn_mask", "is_causal", "scale", "enable_gqa"),
}.items():
    operator(f"{_name}.default")(_operator(_places, several=False))


def _layer(x: ark.Tensor, weight: Value, bias: Value | None) -> ark.Tensor:
    """A linear layer applied to rows (batch, length, columns)."""
    *lead, columns = x.ir.shape
    output = ark.linear(ark.reshape(x, [-1, columns]), weight.tensor, tf32=products_as_tf32(weight))
    if bias is not None:
        output = ark.add(output, bias.tensor)
    return ark.reshape(output, [*lead, weight.shape[0]])


def _hidden(mask: Value, kind: int | None, batch: int) -> ark.Tensor:
    """The mask in a shape that fits scores (batch, heads, rows, keys). kind: torch's number for the
    mask's dimensions: 0 means (row, key), 1 means (batch, key), 2 means all dimensions. In a mask
    of numbers, every element other than 0 hides its key.
    """
    given = mask.tensor if mask.dtype == torch.bool else ark.not_equal(mask.tensor, 0.0)
    shapes = {0: [1, 1, *mask.shape[-2:]], 1: [batch, 1, 1, mask.shape[-1]], 2: [*mask.shape]}
    if kind not in shapes or (kind == 2 and len(mask.shape) != 4):
        raise refuse(f"a mask of the kind {kind} and the shape {list(mask.shape)}")
    return ark.reshape(given, shapes[kind])


def _heads(
    given: list[ark.Tensor], heads: int, mask: Value | None, kind: int | None, tf32: bool
) -> tuple[ark.Tensor, ark.Tensor]:
    """Attention whose heads are stored side by side in the rows of queries, keys and values
    (`given`). Returns the result and the attention weights (batch, heads, ...).
    """
    batch, rows, columns = given[0].ir.shape
    width = columns // heads
    q, k, v = (
        ark.transpose(ark.reshape(t, [batch, t.ir.shape[1], heads, width]), [0, 2, 1, 3])
        for t in given
    )
    scores = ark.mul(ark.matmul(q, k, transpose_other=True, tf32=tf32), float(width**-0.5))
    if mask is not None:
        scores = ark.where(_hidden(mask, kind, batch), float("-inf"), scores)
    weights = ark.softmax(scores)
    output = ark.transpose(ark.matmul(weights, v, tf32=tf32), [0, 2, 1, 3])
    return ark.reshape(output, [batch, rows, columns]), weights


def _parts(x: ark.Tensor, count: int) -> list[ark.Tensor]:
    size = x.ir.shape[-1] // count
    return [x[:, :, i * size : (i + 1) * size] for i in range(count)]


@operator("_native_multi_head_attention.default")
def _multi_head(
    call: Call,
    query: Value,
    key: Value,
    value: Value,
    embed_dim: int,
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value | None,
    weight: Value,
    bias: Value | None,
    mask: Value | None = None,
    need_weights: bool = True,
    average: bool = True,
    mask_type: int | None = None,
) -> list[Any]:
    if any(len(t.shape) != 3 for t in (query, key, value)):
        raise refuse("attention of tensors that are not (batch, rows, columns)")
    if query is key is value:
        given = _parts(_layer(query.tensor, qkv_weight, qkv_bias), 3)
    else:
        given = []
        for place, x in enumerate((query, key, value)):
            part = slice(place * embed_dim, (place + 1) * embed_dim)
            own = Value((embed_dim, embed_dim), qkv_weight.dtype, qkv_weight.tensor[part, :])
            added = None
            if qkv_bias is not None:
                added = Value((embed_dim,), qkv_bias.dtype, qkv_bias.tensor[part])
            given.append(_layer(x.tensor, own, added))
    output, weights = _heads(given, heads, mask, mask_type, products_as_tf32(query))
    if call.wants(1) and need_weights:
        shown = (
            ark.reshape(ark.reduce_mean(weights, 1), call.expected[1][0]) if average else weights
        )
    else:
        shown = None
    return [_layer(output, weight, bias), shown]


@operator("_transformer_encoder_layer_fwd.default")
def _encoder_layer(
    call: Call,
    src: Value,
    embed_dim: int,
    heads: int,
    qkv_weight: Value,
    qkv_bias: Value,
    proj_weight: Value,
    proj_bias: Value,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Value,
    norm_bias_1: Value,
    norm_weight_2: Value,
    norm_bias_2: Value,
    ffn_weight_1: Value,
    ffn_bias_1: Value,
    ffn_weight_2: Value,
    ffn_bias_2: Value,
    mask: Value | None = None,
    mask_type: int | None = None,
) -> Any:
    """Converts torch's fused encoder layer, in eval mode: attention, two norms and a feed-forward
    network.
    """
    if len(src.shape) != 3:
        raise refuse("an encoder layer of a tensor that is not (batch, rows, columns)")

    def attend(x: ark.Tensor) -> ark.Tensor:
        parts = _parts(_layer(x, qkv_weight, qkv_bias), 3)
        output, _ = _heads(parts, heads, mask, mask_type, products_as_tf32(src))
        return _layer(output, proj_weight, proj_bias)

    def feed(x: ark.Tensor) -> ark.Tensor:
        inner = _layer(x, ffn_weight_1, ffn_bias_1)
        inner = ark.gelu_erf(inner) if use_gelu else ark.relu(inner)
        return _layer(inner, ffn_weight_2, ffn_bias_2)

    def norm(x: ark.Tensor, weight: Value, bias: Value) -> ark.Tensor:
        rows = ark.reshape(x, [-1, embed_dim])
        scaled = ark.mul(ark.layernorm(rows, eps), ark.reshape(weight.tensor, [1, embed_dim]))
        output = ark.add(scaled, ark.reshape(bias.tensor, [1, embed_dim]))
        return ark.reshape(output, list(src.shape))

    x = src.tensor
    if norm_first:
        x = ark.add(x, attend(norm(x, norm_weight_1, norm_bias_1)))
        return ark.add(x, feed(norm(x, norm_weight_2, norm_bias_2)))
    x = norm(ark.add(x, attend(x)), norm_weight_1, norm_bias_1)
    return norm(ark.add(x, feed(x)), norm_weight_2, norm_bias_2)
