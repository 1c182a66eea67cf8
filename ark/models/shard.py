"""Splits a decoder over ranks: each holds some heads, some of the inner dimension of what feeds
forward, and some of the vocabulary's rows of the head (tensor parallelism, Shoeybi et al. 2019).

Called by ark.models.build between making a model and its caches. Models know nothing of it.
"""

from __future__ import annotations

from typing import Any

import ark
from ark.errors import InvalidUsageError
from ark.models.config import LlamaConfig
from ark.models.llama import Llama

Share = tuple[slice, ...]
"""What a rank holds of a parameter, as an index of the whole array."""


def check_ranks(config: LlamaConfig, world_size: int) -> None:
    """InvalidUsageError unless so many ranks can share a model of that shape."""
    for what, size in (
        ("key/value heads", config.num_key_value_heads),
        ("intermediate size", config.inner_size),
    ):
        if size % world_size:
            raise InvalidUsageError(
                f"the model has {what} {size}, which {world_size} ranks cannot share "
                "equally; use a number of ranks that divides it"
            )


def split(model: Llama, rank: int, world_size: int) -> dict[ark.Parameter, Share]:
    """Shrinks a named model to a rank's share; returns what each shrunk parameter holds."""
    shares: dict[ark.Parameter, Share] = {}

    def cut(module: Any, name: str, axis: int) -> None:
        whole: ark.Parameter = getattr(module, name)
        shape = whole.shape()
        size = shape[axis] // world_size
        share = [slice(None)] * len(shape)
        share[axis] = slice(rank * size, (rank + 1) * size)
        shape[axis] = size
        made = ark.parameter(shape, whole.dtype())
        setattr(module, name, made)
        shares[made] = tuple(share)

    def sum_up(module: ark.Module, output: ark.Tensor) -> ark.Tensor:
        return ark.all_reduce(output, rank, world_size)

    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        attention.kv_heads //= world_size
        for module, names in ((attention, ("query", "key", "value")), (mlp, ("gate", "up"))):
            for name in names:
                cut(module, name, -2)
                if hasattr(module, f"{name}_bias"):
                    cut(module, f"{name}_bias", -1)
        for module, name in ((attention, "output"), (mlp, "down")):
            cut(module, name, -1)
            module.register_forward_hook(sum_up)
    shares.update(_split_head(model, rank, world_size))
    return shares


def _split_head(model: Llama, rank: int, world_size: int) -> dict[ark.Parameter, Share]:
    """An equal share of the logits; all of them on every rank where none is equal."""
    head = model.head
    vocabulary, hidden = head.weight.shape()
    own, rest = divmod(vocabulary, world_size)
    if rest:
        return {}
    rows = slice(rank * own, (rank + 1) * own)
    shares: dict[ark.Parameter, Share] = {}
    if head.weight is model.embedding:
        head.weight = head.weight[rows]  # which every rank holds whole, to look tokens up
    else:
        head.weight = ark.parameter((own, hidden), head.weight.dtype())
        shares[head.weight] = (rows,)

    def gather(module: ark.Module, output: ark.Tensor) -> ark.Tensor:
        logits = ark.all_gather(output, rank, world_size, name="gathered")
        return ark.reshape(logits, (1, vocabulary))

    head.register_forward_hook(gather)
    return shares
