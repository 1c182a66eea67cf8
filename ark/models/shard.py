"""Splits a decoder over ranks (tensor parallelism, Shoeybi et al. 2019). Each rank holds some
attention heads, a part of the feed-forward part's inner dimension, and some rows of the output
head.

Called by ark.models.build after a model is created and before its caches are created. Models do not
depend on this module.
"""

from __future__ import annotations

from typing import Any

import ark
from ark.errors import InvalidUsageError
from ark.models.config import LlamaConfig
from ark.models.llama import Llama
from ark.models.partial import check_sum

Share = tuple[slice, ...]
"""The part of a parameter that a rank holds, as slices of the whole array."""


def check_ranks(config: LlamaConfig, world_size: int) -> None:
    """Raises InvalidUsageError if this number of ranks cannot share a model of that shape."""
    for subject, size in (
        ("number of key/value heads", config.split_heads),
        ("intermediate size", config.inner_size),
    ):
        if size % world_size:
            raise InvalidUsageError(
                f"the model's {subject} {size} is not divisible by {world_size} ranks; "
                f"use a number of ranks that divides {size}"
            )


def split(model: Llama, rank: int, world_size: int) -> dict[ark.Parameter, Share]:
    """Reduces the parameters of a model, which must have names, to a rank's parts. Returns the part
    of each reduced parameter.
    """
    shares: dict[ark.Parameter, Share] = {}

    def cut(module: Any, name: str, axis: int) -> None:
        whole: ark.Parameter = getattr(module, name)
        shape = whole.shape()
        size = shape[axis] // world_size
        share = [slice(None)] * len(shape)
        share[axis] = slice(rank * size, (rank + 1) * size)
        shape[axis] = size
        part = ark.parameter(shape, whole.dtype())
        setattr(module, name, part)
        shares[part] = tuple(share)

    def sum_up(module: ark.Module, output: ark.Tensor) -> ark.Tensor:
        check_sum(module, output, {part.ir.buffer.id for part in shares}, world_size)
        return ark.all_reduce(output, rank, world_size)

    for layer in model.layers:
        layer.attention.split_heads(world_size)
        for module in (layer.attention, layer.mlp):
            if not hasattr(module, "SPLIT"):
                raise InvalidUsageError(
                    f"{type(module).__name__} does not say which dimensions of its parameters "
                    "ranks share (SPLIT); add it to the decoder, or use one rank"
                )
            for name, axis in module.SPLIT.items():
                cut(module, name, axis)
                if axis == -2 and hasattr(module, f"{name}_bias"):
                    cut(module, f"{name}_bias", -1)
            module.bias_part = 1 / world_size
            module.register_forward_hook(sum_up)
    shares.update(_split_head(model, rank, world_size))
    return shares


def _split_head(model: Llama, rank: int, world_size: int) -> dict[ark.Parameter, Share]:
    """Divides the rows of the head equally among ranks. If the vocabulary is not divisible, every
    rank keeps all rows.
    """
    head = model.head
    vocabulary, hidden = head.weight.shape()
    own, rest = divmod(vocabulary, world_size)
    if rest:
        return {}
    rows = slice(rank * own, (rank + 1) * own)
    shares: dict[ark.Parameter, Share] = {}
    if head.weight is model.embedding:
        head.weight = head.weight[rows]  # every rank keeps the whole embedding
    else:
        head.weight = ark.parameter((own, hidden), head.weight.dtype())
        shares[head.weight] = (rows,)

    def gather(module: ark.Module, output: ark.Tensor) -> ark.Tensor:
        rows = output.shape()[0]
        logits = ark.all_gather(output, rank, world_size, name="gathered")
        if rows > 1:
            parts = ark.reshape(logits, (world_size, rows, own))
            logits = ark.transpose(parts, [1, 0, 2])
        return ark.reshape(logits, (rows, vocabulary))

    head.register_forward_hook(gather)
    return shares
