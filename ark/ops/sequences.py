"""Drawing the next token of several sequences that are decoded together (ark.tasks.sequences)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.ir.attributes import ChooseEachAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.lower.registry import register
from ark.ops.tokens import sample_reference
from ark.tasks.sequences import ChooseEachParams
from ark.tasks.tokens import SETTINGS, SampleParams


def _sample_each(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """New positions, tokens and outputs."""
    logits, settings, positions, tokens, output, stops, *_ = inputs
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


def _choose_each(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The candidates, behind the position, are the best of the logits."""
    return _sample_each([*inputs[:3], *inputs[4:]], attrs)


def _share(tensor: Tensor, batch: int, sequence: int) -> Tensor:
    """What a sequence has of a tensor whose first dimension is cut equally."""
    size = tensor.shape[0] // batch
    name = f"{tensor.name}.{sequence}"
    return dataclasses.replace(part(tensor, 0, sequence * size, size), name=name)


def _lower_sample_each(lowering: Lowering, node: Node) -> None:
    """Each tile finds its best token of each sequence, one task chooses among these for all."""
    logits, settings, position, *others = node.inputs
    batch, vocabulary = logits.shape
    tiles = max(1, min(lowering.machine.processors // batch, vocabulary // 256))
    candidates = lowering.temp((batch * tiles, 2), fp32, f"{node.name}.candidates")
    shared = (logits, settings, position, candidates)
    for b in range(batch):
        operands = [_share(tensor, batch, b) for tensor in shared]
        coords = [(i,) for i in range(tiles)]
        lowering.emit("sample", SampleParams(tiles), operands, coords, f".{b}")
    params = ChooseEachParams(tiles, batch)
    lowering.emit("choose_each", params, [*shared, *others], [(0,)], ".choose")


def _lower_choose_each(lowering: Lowering, node: Node) -> None:
    """One task chooses for all sequences among candidates that the linear layer found."""
    params = ChooseEachParams(node.read(ChooseEachAttributes).tiles, node.inputs[0].shape[0])
    lowering.emit("choose_each", params, list(node.inputs), [(0,)])


register("sample_each", _sample_each, _lower_sample_each)
register("choose_each", _choose_each, _lower_choose_each)
