"""The ops of a decoder besides attention.

These are rotary_embedding and last_row, which users call, and rope_kv and swiglu_pairs, into which
ark.lower.rewrite.pack_weights fuses the ops after a product of packed weights.

A pair is the two elements that a rotation or a gate combines. In the fused ops they are neighbours
in memory, so that one thread has both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.model import Model
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import ProjectionAttributes, RotaryAttributes
from ark.ir.dtype import fp32
from ark.lower.ops.decoder import lower_rope_kv, lower_rotary_embedding, lower_swiglu_pairs
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.ops.caches import check_cache
from ark.ops.elementwise import sub
from ark.ops.logic import minimum
from ark.ops.lookup import gather
from ark.ops.paged import append_reference
from ark.ops.tokens import TokenState, by_sequence, check_position
from ark.tasks.tokens import SETTINGS


def rotary_embedding(
    input: TensorLike,
    position: TensorLike,
    frequencies: TensorLike,
    interleaved: bool = False,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """Rotary position embedding: rotates pairs of elements of each head by position * frequency.

    Su et al., RoFormer (2021), section 3.2.

    input: (rows, heads * width), a row per token. position: (1,) int32, the position of row 0, or
    (rows,) int32, the position of each row. frequencies: (width / 2,) fp32, radians per position.
    Pair i of row r is rotated by (position + r) * frequencies[i], or by position[r] *
    frequencies[i] if each row has its own position. Pair i consists of the elements i and i + width
    / 2 of a head, as in Hugging Face's models. If `interleaved` is True, it consists of the
    elements 2i and 2i + 1. The result has the input's shape and type. Raises ModelError if a row is
    not a whole number of heads.

    Examples:
        >>> position = torch.tensor([1], dtype=torch.int32)
        >>> ark.rotary_embedding(torch.ones(1, 2), position, torch.ones(1)).eval()
        tensor([[-0.3012,  1.3818]])
    """
    x, at, freqs = as_tensor(input), as_tensor(position), as_tensor(frequencies)
    dtype = float_dtype("rotary_embedding", x)
    check_position("rotary_embedding", at, x.ir.shape[0])
    width = _head_width("rotary_embedding", freqs)
    if len(x.ir.shape) != 2 or x.ir.shape[1] % width:
        raise ModelError(
            f"rotary_embedding: the input has shape {list(x.ir.shape)}; expected (rows, heads * "
            f"{width}), as there are {width // 2} frequencies"
        )
    attrs = RotaryAttributes(head_dim=width, interleaved=bool(interleaved)).to_node()
    return result("rotary_embedding", [x, at, freqs], x.ir.shape, dtype, output, attrs, name)


def rope_kv(
    input: TensorLike,
    position: TensorLike,
    frequencies: TensorLike,
    keys: TensorLike,
    values: TensorLike,
    name: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotates the queries and keys of an input and appends its keys and values to their caches.

    input: (rows, (heads + 2 * kv_heads) * width), the queries, keys and values of each row
    concatenated. position and frequencies: as for rotary_embedding with interleaved pairs. keys and
    values: caches (kv_heads, context, width), or with a position per row (rows * kv_heads, context,
    width), because each row then belongs to another sequence. Returns the rotated queries (rows,
    heads * width) in fp32 and both updated caches. Raises ModelError for shapes or types that do
    not fit.

    Examples:
        >>> rows, caches = torch.ones(1, 6), [ark.tensor([1, 4, 2]) for _ in range(2)]
        >>> position = torch.tensor([1], dtype=torch.int32)
        >>> query, keys, values = ark.rope_kv(rows, position, torch.ones(1), *caches)
        >>> query.eval()
        tensor([[-0.3012,  1.3818]])
    """
    tensors = [as_tensor(t) for t in (input, position, frequencies, keys, values)]
    x, at, freqs, key, value = tensors
    float_dtype("rope_kv", x)
    kv_heads, _, width = check_cache("rope_kv", key, at, x.ir.shape[0])
    heads = x.ir.shape[-1] // width - 2 * kv_heads
    shapes = (value.ir.shape == key.ir.shape, value.ir.dtype == key.ir.dtype, value.ir.dense)
    if not all(shapes) or _head_width("rope_kv", freqs) != width:
        raise ModelError(
            f"rope_kv: keys are {key.ir.dtype.name} {list(key.ir.shape)}, values "
            f"{value.ir.dtype.name} {list(value.ir.shape)} with {freqs.ir.shape[0]} frequencies; "
            "the caches must have one shape and be twice as wide as there are frequencies"
        )
    if len(x.ir.shape) != 2 or x.ir.shape[1] % width or heads < 1 or heads % kv_heads:
        raise ModelError(
            f"rope_kv: the input has shape {list(x.ir.shape)}; expected (rows, (heads + "
            f"{2 * kv_heads}) * {width}) with heads a multiple of {kv_heads}"
        )
    model = Model.get_model()
    attrs = ProjectionAttributes(heads=heads, kv_heads=kv_heads, head_dim=width).to_node()
    query = model.new_tensor((x.ir.shape[0], heads * width), fp32, name=name)
    model.graph.add("rope_kv", [t.ir for t in tensors], [query], attrs, name)
    outputs = (query, *(model.graph.rewrite(t.ir) for t in (key, value)))
    return tuple(Tensor(t, model) for t in outputs)  # type: ignore[return-value]


def last_row(rows: TensorLike, state: TokenState, name: str = "") -> Tensor:
    """The row (1, width) that belongs to the last token of the prompt.

    rows: (n, width), a row for each of n consecutive tokens; the first row belongs to the token at
    the state's position. If the prompt's last token is not among them, the result is the last of
    the rows. Types of 8 bits or more.

    Examples:
        >>> state = ark.TokenState.make(8)
        >>> ark.last_row(ark.tensor([4, 2]), state).shape()
        [1, 2]
    """
    tensor = as_tensor(rows)
    last = as_tensor(state.settings)[SETTINGS.index("last") : SETTINGS.index("last") + 1]
    index = minimum(sub(last, state.position), tensor.ir.shape[0] - 1)
    return gather(tensor, index, 0, name=name or "last_row")


def _head_width(op: str, frequencies: Tensor) -> int:
    if len(frequencies.ir.shape) != 1 or frequencies.ir.dtype != fp32:
        raise ModelError(
            f"{op}: the frequencies have shape {list(frequencies.ir.shape)} and type "
            f"{frequencies.ir.dtype.name}; expected fp32, one for each pair of a head"
        )
    return 2 * frequencies.ir.shape[0]


def _rotated(
    x: np.ndarray, position: int, frequencies: np.ndarray, interleaved: bool
) -> np.ndarray:
    """The rotary embedding of x (rows, heads * width), computed with NumPy."""
    rows, half = len(x), len(frequencies)
    pairs = (half, 2) if interleaved else (2, half)
    split_at = 3 if interleaved else 2
    parts = np.moveaxis(x.reshape(rows, -1, *pairs), split_at, 0)
    angles = ((position + np.arange(rows))[:, None] * frequencies)[:, None, :]
    rotated = (parts[0] + 1j * parts[1]) * np.exp(1j * angles)
    return np.stack([rotated.real, rotated.imag], split_at).reshape(x.shape)


def _rotary(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    x, position, frequencies = inputs
    if len(position) > 1:
        each = by_sequence(inputs, len(position), (2,))
        return [np.concatenate([_rotary(one, attrs)[0] for one in each])]
    return [
        _rotated(x, int(position[0]), frequencies, RotaryAttributes.from_node(attrs).interleaved)
    ]


def rope_kv_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of rope_kv. Returns the rotated queries, the new keys and values in one
    array, and the two new caches.
    """
    heads = ProjectionAttributes.from_node(attrs)
    if heads.head_eps:
        *others, norms = inputs
        normed = [_normed_heads(others[0], norms, heads), *others[1:]]
        return rope_kv_reference(normed, {**attrs, "head_eps": 0.0})
    x, position, frequencies, keys, values, *table = inputs
    if table:
        return _rope_pages(inputs, attrs)
    if len(position) > 1:
        each = [rope_kv_reference(i, attrs) for i in by_sequence(inputs, len(position), (2,))]
        return [np.concatenate(parts) for parts in zip(*each, strict=True)]
    at, width = int(position[0]), heads.head_dim
    ends = np.cumsum([heads.heads * width, heads.kv_heads * width])
    query, key, value = np.split(x, ends, axis=1)
    query, key = (_rotated(part, at, frequencies, True) for part in (query, key))
    caches = []
    for cache, rows in ((keys, key), (values, value)):
        updated = cache.copy()
        heads, context, _ = cache.shape
        count = max(0, min(len(rows), context - at))
        updated[:, at : at + count] = rows[:count].reshape(count, heads, width).swapaxes(0, 1)
        caches.append(updated)
    return [query, np.concatenate([key, value], axis=1), *caches]


def _normed_heads(x: np.ndarray, norms: np.ndarray, heads: ProjectionAttributes) -> np.ndarray:
    """A projection whose heads of queries and keys are divided by their root mean square and
    multiplied by the norms' weights.
    """
    split = x.reshape(len(x), -1, heads.head_dim)
    scales = np.sqrt((split**2).mean(-1, keepdims=True) + heads.head_eps)
    weights = np.repeat(norms.reshape(2, -1), [heads.heads, heads.kv_heads], axis=0)
    rotated = heads.heads + heads.kv_heads
    normed = split[:, :rotated] / scales[:, :rotated] * weights
    return np.concatenate([normed, split[:, rotated:]], 1).reshape(x.shape)


def _rope_pages(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of rope_kv for caches in pages; otherwise as rope_kv_reference."""
    x, position, frequencies, keys, values, table = inputs
    heads = ProjectionAttributes.from_node(attrs)
    ends = np.cumsum([heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim])
    rows_of = []
    for rows, at in zip(np.split(x, len(position)), position, strict=True):
        *turned, value = np.split(rows, ends, axis=1)
        rows_of.append([*(_rotated(part, int(at), frequencies, True) for part in turned), value])
    query, key, value = (np.concatenate(part) for part in zip(*rows_of, strict=True))
    caches = [
        append_reference([rows, table, position, cache], {"apart": True})[0]
        for cache, rows in ((keys, key), (values, value))
    ]
    return [query, np.concatenate([key, value], axis=1), *caches]


def _pairs(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    gate, up = inputs[0][..., 0::2], inputs[0][..., 1::2]
    return [gate / (1.0 + np.exp(-gate)) * up]


register("rotary_embedding", _rotary, lower_rotary_embedding, aliasing="none")
register("rope_kv", rope_kv_reference, lower_rope_kv)
register("swiglu_pairs", _pairs, lower_swiglu_pairs)
