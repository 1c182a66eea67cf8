"""Cases and helpers of tests/backend/test_fuse_attention.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ark
from ark.ir.dtype import bf16, fp32

BATCH, HEADS, ROWS, WIDTH = 2, 3, 130, 24


@dataclass(frozen=True)
class Form:
    """One way to write attention: the layouts of queries, keys and values in the input, the
    computation of scores, and the layout of results. shape: of the input tensor or tensors. split:
    returns queries, keys and values, each (batch, heads, rows, width).
    """

    shape: tuple[int, ...]
    split: Callable[[Any], list[Any]]
    scores: str = "plain"
    mask: str = ""  # a form of the causal mask, or a mask that depends on the input (INPUT_MASKS)
    back: tuple[int, ...] | None = (0, 2, 1, 3)
    copies: int = 0  # transposes that remain after the rewrite


def by_columns(x: Any) -> list[Any]:
    """Splits (batch, rows, 3 * heads * width), the output of one projection: queries, keys and
    values are side by side in each row.
    """
    size = HEADS * WIDTH
    parts = [x[:, :, i * size : (i + 1) * size] for i in range(3)]
    split = [ark.reshape(p, [BATCH, ROWS, HEADS, WIDTH]) for p in parts]
    return [ark.transpose(p, [0, 2, 1, 3]) for p in split]


def by_permutation(x: Any) -> list[Any]:
    """Splits the same layout as `by_columns`, by one permutation of five dimensions."""
    split = ark.transpose(ark.reshape(x, [BATCH, ROWS, 3, HEADS, WIDTH]), [2, 0, 3, 1, 4])
    return [ark.reshape(split[i : i + 1], [BATCH, HEADS, ROWS, WIDTH]) for i in range(3)]


def rows_first(x: Any) -> list[Any]:
    """Splits (rows, batch, 3 * heads * width), the layout of nn.MultiheadAttention."""
    split = ark.reshape(x, [1, ROWS, BATCH, 3, HEADS * WIDTH])
    whole = ark.transpose(split, [3, 1, 2, 0, 4])
    parts = [ark.reshape(whole[i : i + 1], [ROWS, BATCH * HEADS, WIDTH]) for i in range(3)]
    turned = [ark.transpose(p, [1, 0, 2]) for p in parts]
    return [ark.reshape(p, [BATCH, HEADS, ROWS, WIDTH]) for p in turned]


def grouped(x: Any) -> list[Any]:
    """Splits (batch, rows, 10 * width): six query heads, two key heads and two value heads. Each
    key and value head is repeated for three query heads.
    """
    turned = []
    for first, count in ((0, 6), (6, 2), (8, 2)):
        part = x[:, :, first * WIDTH : (first + count) * WIDTH]
        split = ark.transpose(ark.reshape(part, [BATCH, ROWS, count, WIDTH]), [0, 2, 1, 3])
        if count == 2:
            alone = ark.reshape(split, [BATCH, 2, 1, ROWS, WIDTH])
            split = ark.reshape(
                ark.expand(alone, [BATCH, 2, 3, ROWS, WIDTH]), [BATCH, 6, ROWS, WIDTH]
            )
        turned.append(split)
    return turned


def apart(x: Any) -> list[Any]:
    """Splits (3, batch, heads, rows, width), where each head is dense."""
    return [ark.reshape(x[i : i + 1], [BATCH, HEADS, ROWS, WIDTH]) for i in range(3)]


def lower_left(kind: str, dtype: Any = bf16) -> Any:
    """Returns a causal mask that the program computes, in the form `kind`."""
    rows, columns = (ark.iota((ROWS, ROWS), d, ark.int32) for d in (0, 1))
    if kind == "where":
        return ark.less_equal(columns, rows)
    hidden = ark.greater(columns, rows)
    if kind == "hidden":
        return hidden
    return ark.reshape(
        ark.where(hidden, float("-inf"), ark.cast(ark.mul(rows, 0), dtype)), [1, 1, ROWS, ROWS]
    )


INPUT_MASKS = ("keys", "no keys", "low", "bias", "windows")


def under_input(kind: str, scores: Any, x: Any) -> Any:
    """Returns scores under a mask computed from the input (batch, rows, columns). kind: `keys`
    hides some keys, `no keys` hides all keys of some rows, `low` gives them the score -1e30 instead
    of -inf, `bias` adds to the scores, `windows` adds a bias by head and then a mask by window, as
    Swin (Liu et al. 2021) does; the windows are the batch.
    """
    if kind == "windows":
        bias = ark.reshape(x[:1, :, :ROWS], [1, 1, ROWS, ROWS])
        number = ark.cast(ark.iota((1, HEADS, 1, 1), 1, ark.int32), x.dtype())
        biased = ark.add(scores, ark.mul(bias, number))
        mask = ark.reshape(x[:, :, ROWS - 1 : ROWS], [1, BATCH, 1, 1, ROWS])
        each = ark.reshape(biased, [1, BATCH, HEADS, ROWS, ROWS])
        return ark.reshape(ark.add(each, mask), [BATCH, HEADS, ROWS, ROWS])
    if kind == "bias":
        return ark.add(scores, ark.reshape(x[:, :, :ROWS], [BATCH, 1, ROWS, ROWS]))
    high = ark.greater(ark.reshape(x[:, :, 1:2], [BATCH, ROWS]), 0.5)
    if kind == "keys":
        return ark.where(ark.reshape(high, [BATCH, 1, 1, ROWS]), scores, float("-inf"))
    rows = ark.reshape(high, [BATCH, 1, ROWS, 1])
    return ark.where(rows, float("-inf") if kind == "no keys" else -1e30, scores)


def attention(form: Form, x: Any) -> Any:
    """Returns attention written with plain ops, as user code writes it."""
    q, k, v = form.split(x)
    scale = WIDTH**-0.5
    if form.scores == "scaled queries":
        scores = ark.matmul(ark.mul(q, scale), k, transpose_other=True)
    elif form.scores == "scaled queries, turned keys":
        scaled = ark.mul(q, scale)
        scores = ark.matmul(scaled, ark.transpose(k, [0, 1, 3, 2]))
    elif form.scores == "turned keys":
        scores = ark.div(ark.matmul(q, ark.transpose(k, [0, 1, 3, 2])), WIDTH**0.5)
    else:
        scores = ark.mul(ark.matmul(q, k, transpose_other=True), scale)
    if form.mask == "where":
        scores = ark.where(lower_left("where"), scores, float("-inf"))
    elif form.mask == "hidden":
        scores = ark.where(lower_left("hidden"), float("-inf"), scores)
    elif form.mask == "add":
        scores = ark.add(scores, lower_left("add", scores.dtype()))
    elif form.mask:
        scores = under_input(form.mask, scores, x)
    if form.scores == "wide":
        result = ark.matmul(ark.cast(ark.softmax(ark.cast(scores, fp32)), x.dtype()), v)
    else:
        result = ark.matmul(ark.softmax(scores), v)
    return result if form.back is None else ark.transpose(result, list(form.back))


COLUMNS = (BATCH, ROWS, 3 * HEADS * WIDTH)
FORMS = {
    "columns": Form(COLUMNS, by_columns),
    "columns, causal": Form(COLUMNS, by_columns, "scaled queries", "where"),
    "columns, keys turned": Form(COLUMNS, by_columns, "turned keys", "hidden"),
    "columns, fp32 weights": Form(COLUMNS, by_columns, "wide", "add"),
    "columns, keys that the input hides": Form(COLUMNS, by_columns, mask="keys"),
    "columns, rows without keys": Form(COLUMNS, by_columns, "scaled queries", "no keys"),
    "columns, rows with low scores": Form(COLUMNS, by_columns, mask="low"),
    "columns, bias": Form(COLUMNS, by_columns, "turned keys", "bias"),
    "columns, by heads": Form(COLUMNS, by_columns, back=None, copies=1),
    "permutation": Form(COLUMNS, by_permutation, "scaled queries"),
    "permutation, bias and mask": Form(
        COLUMNS, by_permutation, "scaled queries, turned keys", "windows"
    ),
    "rows first": Form((ROWS, BATCH, COLUMNS[2]), rows_first, back=(2, 0, 1, 3), copies=1),
    "grouped": Form((BATCH, ROWS, 10 * WIDTH), grouped, mask="where"),
    "apart": Form((3, BATCH, HEADS, ROWS, WIDTH), apart, mask="where", back=None),
    "apart, turned back": Form((3, BATCH, HEADS, ROWS, WIDTH), apart, copies=1),
}


def by_torch(form: Form, x: np.ndarray) -> np.ndarray:
    """Returns the expected result, by torch in float64, from an input in the form's layout."""
    given = torch.tensor(x.astype(np.float64))
    if form.split is apart:
        q, k, v = given
    elif form.split is rows_first:
        parts = given.reshape(ROWS, BATCH, 3, HEADS, WIDTH).permute(2, 1, 3, 0, 4)
        q, k, v = parts
    elif form.split is grouped:
        parts = given.reshape(BATCH, ROWS, 10, WIDTH).permute(0, 2, 1, 3).split((6, 2, 2), 1)
        q, k, v = parts[0], *(p.repeat_interleave(3, 1) for p in parts[1:])
    else:
        q, k, v = given.reshape(BATCH, ROWS, 3, HEADS, WIDTH).permute(2, 0, 3, 1, 4)
    if form.mask in INPUT_MASKS:
        scores, high = q @ k.mT * WIDTH**-0.5, given[:, :, 1] > 0.5
        if form.mask == "bias":
            scores = scores + given[:, None, :, :ROWS]
        elif form.mask == "windows":
            bias = given[0, :, :ROWS] * torch.arange(HEADS)[:, None, None]
            scores = scores + bias + given[:, None, None, :, ROWS - 1]
        elif form.mask == "keys":
            scores = scores.masked_fill(~high[:, None, None], -torch.inf)
        else:
            low = -torch.inf if form.mask == "no keys" else -1e30
            scores = scores.masked_fill(high[:, None, :, None], low)
        result = torch.softmax(scores, -1) @ v
    else:
        result = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=bool(form.mask)
        )
    return (result if form.back is None else result.permute(*form.back)).numpy()
