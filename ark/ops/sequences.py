"""Drawing the next token of several sequences that are decoded together (ark.tasks.sequences)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.lower.registry import register
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE
from ark.ops.logits import draws, makes_logits
from ark.ops.tokens import sample_reference
from ark.plan.groups import Group
from ark.tasks.linear_form import MATRIX_ROWS, MOST_NARROW, narrow_rows
from ark.tasks.linear_params import LinearParams
from ark.tasks.sequences import ChooseEachParams
from ark.tasks.tokens import SETTINGS, SampleParams


def _sample_each(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """New positions, tokens and outputs."""
    logits, settings, positions, tokens, output, stops = inputs
    batch = len(logits)
    rows = [np.array_split(t, batch) for t in (settings, positions, tokens, output)]
    made = []
    for logit, setting, position, text, shown in zip(logits, *rows, strict=True):
        at, own = int(position[0]), dict(zip(SETTINGS, map(int, setting), strict=True))
        last, limit, known = own["last"], own["limit"], stops[: own["stops"]]
        if at < last:
            made.append([position + 1, text, shown])
        elif at > last and (max(at + 1, 0) >= min(limit, len(text)) or text[at] in known):
            made.append([position, text, shown])
        else:
            one = [logit[None], setting, position, text, shown, stops]
            made.append(sample_reference(one, {}))
    return [np.concatenate(parts) for parts in zip(*made, strict=True)]


def _share(tensor: Tensor, batch: int, sequence: int) -> Tensor:
    """What a sequence has of a tensor whose first dimension is cut equally."""
    size = tensor.shape[0] // batch
    name = f"{tensor.name}.{sequence}"
    return dataclasses.replace(part(tensor, 0, sequence * size, size), name=name)


def _takes(product: Group, machine: Machine) -> bool:
    """Has the layer a body of several rows that finds each one's best?"""
    (x, weight), params = product.operands[:2], product.params
    return (
        machine.variant.role(COMMUNICATE) > 0
        and 1 < x.shape[0] <= MOST_NARROW
        and isinstance(params, LinearParams)
        and narrow_rows(x.shape[0], weight, params.split_k)
        and params.rows in MATRIX_ROWS
    )


def _lower_sample_each(lowering: Lowering, node: Node) -> None:
    """Each tile finds its best token of each sequence, one task chooses among these for all.

    In a variant whose bodies take few rows at once, who makes logits finds the best of its own.
    """
    logits, settings, position, tokens, output, stops = node.inputs
    batch, vocabulary = logits.shape
    product = makes_logits(lowering, node)
    finds = product is not None and _takes(product, lowering.machine)
    tiles = max(1, min(lowering.machine.processors // batch, vocabulary // 256))
    if product is not None and finds:
        tiles = len(product.coords)
    candidates = lowering.temp((batch * tiles, 2), fp32, f"{node.name}.candidates")
    if product is not None and finds:
        draws(product, tiles)
        product.operands += (settings, position, candidates)
    for b in range(0 if finds else batch):
        shared = (logits, settings, position, candidates)
        operands = [_share(tensor, batch, b) for tensor in shared]
        coords = [(i,) for i in range(tiles)]
        lowering.emit("sample", SampleParams(tiles), operands, coords, f".{b}")
    operands = [logits, settings, position, candidates, tokens, output, stops]
    lowering.emit("choose_each", ChooseEachParams(tiles, batch), operands, [(0,)], ".choose")


register("sample_each", _sample_each, _lower_sample_each)
