"""Attention with its gradients: written by single ops as front ends write it, and as the op that
lowering makes of the gradients; and the results by torch in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ark
from ark.frontend.tensor import Tensor
from ark.ir.attributes import AttentionAttributes
from ark.ir.dtype import DataType, fp32
from ark.ir.graph import Graph

INPUTS = ("query", "key", "value", "given")
GRADIENTS = ("to_query", "to_key", "to_value")
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Sizes of an attention. mask: "keys" hides keys by a mask (batch, 1, 1, context), and all keys
    of the last sequence; "bias" adds numbers (1, heads, rows, context). by_rows: True if a row of
    queries has all heads; otherwise each head is dense.
    """

    batch: int
    heads: int
    rows: int
    context: int
    width: int
    causal: bool = False
    mask: str = ""
    by_rows: bool = True

    @property
    def name(self) -> str:
        words = (self.mask, "causal" * self.causal, "heads" * (not self.by_rows))
        sizes = (self.batch, self.heads, self.rows, self.context, self.width)
        return " ".join(("x".join(map(str, sizes)), *filter(None, words)))

    @property
    def scale(self) -> float:
        return float(self.width**-0.5)

    def shape(self, length: int) -> list[int]:
        if self.by_rows:
            return [self.batch, length, self.heads * self.width]
        return [self.batch, self.heads, length, self.width]


def build(case: Case, dtype: DataType) -> None:
    """Adds the attention and its gradients to the current model, by single ops. Tensors have the
    names of `values`.
    """
    b, h, w = case.batch, case.heads, case.width

    def heads(x: Any) -> Any:
        split = ark.reshape(x, [b, x.shape()[1], h, w]) if case.by_rows else x
        return ark.transpose(split, [0, 2, 1, 3]) if case.by_rows else x

    lengths = (case.rows, case.context, case.context)
    given = [
        ark.tensor(case.shape(n), dtype, name=i) for n, i in zip(lengths, INPUTS, strict=False)
    ]
    q, k, v = map(heads, given)
    scores = ark.mul(ark.matmul(q, k, transpose_other=True, dtype=fp32), case.scale)
    if case.causal:
        row, column = (ark.iota([case.rows, case.context], d, ark.int32) for d in (0, 1))
        scores = ark.where(ark.less_equal(column, row), scores, float("-inf"))
    if case.mask == "keys":
        mask = ark.tensor([b, 1, 1, case.context], ark.bool, name="mask")
        scores = ark.where(mask, scores, float("-inf"))
    elif case.mask:
        mask = ark.tensor([1, h, case.rows, case.context], fp32, name="mask")
        scores = ark.add(scores, mask)
    result = ark.matmul(ark.cast(ark.safe_softmax(scores), dtype), v)
    if case.by_rows:
        result = ark.reshape(ark.transpose(result, [0, 2, 1, 3]), case.shape(case.rows))
    back = ark.tensor(case.shape(case.rows), dtype, name=INPUTS[3])
    for name, gradient in zip(GRADIENTS, ark.grad(result, given, back), strict=True):
        ark.copy(gradient, ark.tensor(gradient.shape(), dtype, name=name))
    ark.copy(result, ark.tensor(result.shape(), dtype, name="result"))


def attributes(case: Case, **more: Any) -> AttentionAttributes:
    return AttentionAttributes(
        heads=case.heads,
        head_dim=case.width,
        scale=case.scale,
        causal=case.causal,
        placed=False,
        by_rows=True,
        **more,
    )


def single(case: Case, dtype: DataType, mask_dtype: DataType = fp32) -> list[Tensor]:
    """Adds the gradients to the current model as one op, and its inputs."""
    lengths = (case.rows, case.context, case.context, case.rows)
    inputs = [ark.tensor(case.shape(n), dtype) for n in lengths]
    inputs += [ark.tensor([case.batch, case.rows, case.heads]) for _ in range(2)]
    if case.mask:
        keys = case.mask == "keys"
        sizes = [case.batch, 1, 1] if keys else [1, case.heads, case.rows]
        inputs.append(ark.tensor([*sizes, case.context], ark.bool if keys else mask_dtype))
    how = attributes(case, mask={"keys": "seen", "bias": "added"}.get(case.mask, ""))
    model = ark.Model.get_model()
    outputs = [model.new_tensor(t.ir.shape, dtype) for t in inputs[:3]]
    model.graph.add("attention_gradient", [t.ir for t in inputs], outputs, how.to_node())
    return [Tensor(t, model) for t in outputs]


def with_logarithms(case: Case, dtype: DataType) -> None:
    """Adds attention whose second result is the logarithm of the sum of exponentials."""
    lengths = (case.rows, case.context, case.context)
    inputs = [ark.tensor(case.shape(n), dtype) for n in lengths]
    how = attributes(case, logarithms=True)
    model = ark.Model.get_model()
    result = model.new_tensor(inputs[0].ir.shape, dtype)
    logarithms = model.new_tensor((case.batch, case.rows, case.heads), fp32)
    outputs = [result, logarithms]
    model.graph.add("attention", [t.ir for t in inputs], outputs, how.to_node())


def values(case: Case, dtype: DataType, seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns random inputs by name."""
    random = torch.Generator().manual_seed(seed)
    lengths = (case.rows, case.context, case.context, case.rows)
    kind = TORCH[dtype.name]
    given = {
        name: torch.randn(case.shape(n), generator=random).to(kind)
        for name, n in zip(INPUTS, lengths, strict=True)
    }
    if case.mask == "keys":
        seen = torch.rand((case.batch, 1, 1, case.context), generator=random) > 0.3
        seen[..., 0] = True
        seen[-1] = False
        given["mask"] = seen
    elif case.mask:
        given["mask"] = torch.randn((1, case.heads, case.rows, case.context), generator=random)
    return given


def expected(case: Case, given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Returns, in float64: attention's result, the gradients of its inputs, the log-sum-exp of each
    row of scores ("logarithms"), and the sum of each row of the result times its gradient
    ("slopes").
    """
    wide = [given[name].double().requires_grad_() for name in INPUTS[:3]]

    def heads(x: torch.Tensor) -> torch.Tensor:
        split = (case.batch, -1, case.heads, case.width)
        return x.reshape(split).transpose(1, 2) if case.by_rows else x

    q, k, v = map(heads, wide)
    scores = q @ k.transpose(-1, -2) * case.scale
    if case.causal:
        seen = torch.ones(case.rows, case.context, dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if case.mask == "keys":
        scores = scores.masked_fill(~given["mask"], -torch.inf)
    elif case.mask:
        scores = scores + given["mask"]
    blind = torch.isneginf(scores).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)
    result = weights @ v
    if case.by_rows:
        result = result.transpose(1, 2).reshape(case.shape(case.rows))
    back = given["given"].double()
    gradients = torch.autograd.grad(result, wide, back)
    logarithms = torch.logsumexp(scores, -1).masked_fill(blind[..., 0], torch.inf)
    slopes = (heads(result) * heads(back)).sum(-1)
    named = dict(zip(GRADIENTS, gradients, strict=True))
    named |= {"result": result, "logarithms": logarithms.transpose(1, 2)}
    named["slopes"] = slopes.transpose(1, 2)
    return {name: t.detach().numpy() for name, t in named.items()}


def operands(case: Case, given: dict[str, torch.Tensor]) -> Sequence[np.ndarray]:
    """Returns the inputs of the op of `single`."""
    right_of = expected(case, given)
    inputs = [given[name].double().numpy() for name in INPUTS]
    inputs += [right_of["logarithms"], right_of["slopes"]]
    return [*inputs, given["mask"].numpy()] if case.mask else inputs


def graph(case: Case, dtype: DataType) -> Graph:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        build(case, dtype)
    return model.graph
