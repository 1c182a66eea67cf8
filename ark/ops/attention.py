"""Attention over keys and values: the op for users, and its definition in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.errors import ModelError
from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.attributes import AttentionAttributes, MaskForm
from ark.ir.dtype import FLOATS, bool_, fp32
from ark.lower.ops.attention import lower_attention
from ark.lower.registry import register
from ark.ops.base import float_dtype, result
from ark.ops.caches import cache_dtype
from ark.ops.tokens import by_sequence, check_position
from ark.ops.views import reshape


def attention(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    position: TensorLike | None = None,
    scale: float | None = None,
    output: Output = None,
    name: str = "",
    *,
    causal: bool = True,
    window: int = 0,
    softcap: float = 0.0,
    sinks: TensorLike | None = None,
    mask: TensorLike | None = None,
) -> Tensor:
    """Grouped-query attention (Vaswani et al. 2017, Ainslie et al. 2023).

    query: ([batch,] rows, heads * width); a row is a token. key and value: ([batch,] kv_heads,
    context, width), the layout of a KV cache; heads must be a multiple of kv_heads. Row r of the
    query is the token at position + r. If causal, it attends to the keys 0 to position + r,
    otherwise to all keys.

    position: (1,) int32, by default 0. window: if above 0, a row attends only to the last `window`
    of these keys. scale: the factor of scores, by default width ** -0.5. softcap: if above 0,
    scores become softcap * tanh(score / softcap) (Gemma 2). sinks: (heads,) fp32, a further score
    per head that enters the softmax but has no value (GPT-OSS).

    mask: bool, True for visible keys, or floats that are added to scores. It broadcasts to (batch,
    heads, rows, context); its batch size may also divide the batch, and the masks then repeat. A
    row without a visible key gives zeros. Masked keys and values must be finite numbers.

    If `position` has the shape (rows,), each row of the query (rows, heads * width) belongs to
    another sequence. Keys and values are then (rows * kv_heads, context, width), the heads of all
    sequences concatenated.

    The result has the query's shape and type, fp32, fp16 or bf16; sums and exponentials are
    computed in fp32. Raises ModelError for shapes or types that do not fit.

    Examples:
        >>> x = torch.arange(6.0).reshape(3, 2)  # three rows, one head of two
        >>> keys = torch.arange(6.0).reshape(1, 3, 2)
        >>> ark.attention(x, keys, keys).eval()
        tensor([[0.0000, 1.0000],
                [1.9983, 2.9983],
                [4.0000, 5.0000]])
    """
    q, k, v = (as_tensor(t) for t in (query, key, value))
    dtype = float_dtype("attention", q)
    cache_dtype("attention", k)
    shape, columns = k.ir.shape, q.ir.shape[-1]
    batch = q.ir.shape[:-2]
    if len(q.ir.shape) not in (2, 3) or len(shape) != len(batch) + 3 or shape[:-3] != batch:
        raise ModelError(
            f"attention: the query has shape {list(q.ir.shape)} and the keys {list(shape)}; "
            "expected ([batch,] rows, heads * width) and ([batch,] kv_heads, context, width)"
        )
    if v.ir.shape != shape or v.ir.dtype != k.ir.dtype or not (v.ir.dense and k.ir.dense):
        raise ModelError(
            f"attention: keys are {k.ir.dtype.name} {list(shape)}, values are "
            f"{v.ir.dtype.name} {list(v.ir.shape)}; they must have one dtype and shape and be dense"
        )
    many = len(q.ir.shape) == 2 and position is not None
    at = as_tensor(position) if position is not None else None
    sequences = check_position("attention", at, q.ir.shape[0] if many else 1) if at else 1
    width, kv_heads = shape[-1], shape[-3] // sequences
    if columns % (kv_heads * width) or shape[-3] % sequences:
        raise ModelError(
            f"attention: the query has shape {list(q.ir.shape)}; expected (rows, heads * {width}) "
            f"with heads a multiple of {kv_heads}"
        )
    heads = columns // width
    check_mask("attention", window, softcap, causal)
    inputs = [q, k, v]
    if at is not None:
        inputs.append(at)
    if sinks is not None:
        inputs.append(check_sinks("attention", sinks, heads))
    form: MaskForm = ""
    if mask is not None:
        given = as_tensor(mask)
        form = "seen" if given.ir.dtype == bool_ else "added"
        sizes = (batch[0] if batch else 1, heads, q.ir.shape[-2], shape[-2])
        inputs.append(_mask(given, sizes, sequences))
    attrs = AttentionAttributes(
        heads=heads,
        head_dim=width,
        scale=float(width**-0.5 if scale is None else scale),
        causal=bool(causal),
        window=int(window),
        softcap=float(softcap),
        placed=at is not None,
        sinks=sinks is not None,
        mask=form,
    )
    return result("attention", inputs, q.ir.shape, dtype, output, attrs.to_node(), name)


def check_mask(op: str, window: int, softcap: float, causal: bool = True) -> None:
    """Raises ModelError if the window or the soft cap is negative, or if a window is given and
    `causal` is False.
    """
    if window < 0 or softcap < 0 or (window and not causal):
        raise ModelError(
            f"{op}: the window is {window}, the soft cap is {softcap} and causal is {causal}; "
            "window and soft cap must be at least 0, and a window covers earlier positions, so "
            "it needs causal=True"
        )


def _mask(given: Tensor, sizes: Sequence[int], sequences: int) -> Tensor:
    """The mask of attention, viewed with four dimensions (batch, heads, rows, context). The mask
    must broadcast to `sizes`. Alternatively, its batch size may divide that of `sizes`, so that the
    masks repeat. Raises ModelError for any other shape.
    """
    aligned = (1,) * (4 - len(given.ir.shape)) + given.ir.shape
    fits = len(aligned) == 4 and all(
        n in (1, size) or (d == 0 and n > 0 and size % n == 0)
        for d, (n, size) in enumerate(zip(aligned, sizes, strict=True))
    )
    if not fits or sequences > 1 or given.ir.dtype not in (bool_, *FLOATS):
        raise ModelError(
            f"attention: the mask is {given.ir.dtype.name} {list(given.ir.shape)}, and there are "
            f"{sequences} sequences; expected one sequence, and a mask of bool or floats that "
            f"broadcasts to {list(sizes)}"
        )
    return given if aligned == given.ir.shape else reshape(given, aligned)


def check_sinks(op: str, sinks: Any, heads: int) -> Tensor:
    """`sinks` as a tensor. Raises ModelError unless it is fp32 of shape (heads,)."""
    given = as_tensor(sinks)
    if given.ir.shape != (heads,) or given.ir.dtype != fp32:
        raise ModelError(
            f"{op}: the sinks are {given.ir.dtype.name} {list(given.ir.shape)}; expected "
            f"fp32 ({heads},), one per head"
        )
    return given


def attention_reference(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of attention, computed for one row and head at a time.

    The inputs may end with a tensor (1, 2 * kv_heads * width): the key and value of the query's
    single row, which the caches may not contain yet (ark.lower.rewrite.pack_weights). The attribute
    by_rows is True if keys and values are ([batch,] context, kv_heads * width), the layout that
    ark.lower.rewrite.fuse_attention creates. If the attribute `logarithms` is True, the second
    result has of each row and head the logarithm of the sum of exponentials.
    """
    q, key, value, *rest = inputs
    how = AttentionAttributes.from_node(attrs)
    if how.by_rows:
        parted = (
            np.moveaxis(c.reshape(*c.shape[:-1], -1, how.head_dim), -2, -3) for c in (key, value)
        )
        return attention_reference([q, *parted, *rest], {**attrs, "by_rows": False})
    if how.placed and len(rest[0]) > 1:
        each = by_sequence(inputs, len(rest[0]), (4,) if how.sinks else ())
        return [np.concatenate([attention_reference(one, attrs)[0] for one in each])]
    position = int(rest.pop(0)[0]) if how.placed else 0
    sinks = rest.pop(0) if how.sinks else None
    mask = rest.pop() if how.mask else None
    if rest:  # the key and value of the query's row, which may not be in the caches yet
        newest = np.split(rest[0].reshape(-1, how.head_dim), 2)
        key, value = (c.copy() for c in (key, value))
        for cache, row in zip((key, value), newest, strict=True):
            cache[:, position] = row
    if q.ndim == 3:
        options = {**attrs, "placed": True}
        extra = [np.array([position]), *([] if sinks is None else [sinks])]
        masks = [[] if mask is None else [mask[n % len(mask)][None]] for n in range(len(q))]
        rows = zip(q, key, value, masks, strict=True)
        results = [attention_reference([*row, *extra, *m], options) for *row, m in rows]
        return [np.stack(each) for each in zip(*results, strict=True)]
    heads, width, context = how.heads, how.head_dim, key.shape[1]
    group = heads // key.shape[0]
    out, logarithms = np.zeros(q.shape), np.full((len(q), heads), np.inf)
    full = None if mask is None else np.broadcast_to(mask[0], (heads, len(q), context))
    for r in range(len(q)):
        end = min(position + r + 1, context) if how.causal else context
        begin = max(0, position + r + 1 - how.window) if how.window else 0
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = key[h // group, begin:end] @ q[r, part] * how.scale
            if how.softcap:
                scores = how.softcap * np.tanh(scores / how.softcap)
            if full is not None:
                scores = _masked_scores(scores, full[h, r, begin:end], how)
            if sinks is not None:
                scores = np.append(scores, sinks[h])
            if (scores == -np.inf).all():
                out[r, part] = np.nan if how.strict else 0.0
                logarithms[r, h] = np.nan if how.strict else np.inf
                continue
            weights = np.exp(scores - scores.max())
            logarithms[r, h] = scores.max() + np.log(weights.sum())
            seen = weights[: max(0, end - begin)]
            out[r, part] = seen / weights.sum() @ value[h // group, begin:end]
    return [out, logarithms] if how.logarithms else [out]


def _masked_scores(scores: np.ndarray, mask: np.ndarray, how: AttentionAttributes) -> np.ndarray:
    """The scores of a row after its mask is applied: the mask is added, or hidden scores are
    replaced by `how.fill`.
    """
    if how.mask == "added":
        return np.asarray(scores + mask.astype(scores.dtype))
    return np.where(mask == (how.mask == "seen"), scores, how.fill)


register("attention", attention_reference, lower_attention, aliasing="none")
