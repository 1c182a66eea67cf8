"""Lowering of the choice of a token for each of several sequences."""

from __future__ import annotations

import dataclasses

from ark.ir.attributes import ChooseEachAttributes
from ark.ir.dtype import fp32
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.lower.context import Lowering
from ark.lower.merge import part
from ark.tasks.sequences import ChooseEachParams
from ark.tasks.tokens import SampleParams


def _share(tensor: Tensor, batch: int, sequence: int) -> Tensor:
    """The part of a tensor that belongs to sequence number `sequence`. The first dimension of the
    tensor is divided equally among `batch` sequences.
    """
    size = tensor.shape[0] // batch
    name = f"{tensor.name}.{sequence}"
    return dataclasses.replace(part(tensor, 0, sequence * size, size), name=name)


def lower_sample_each(lowering: Lowering, node: Node) -> None:
    """Emits the tasks that sample a token for each sequence by its largest logit. Tasks find the
    best token in each tile of each sequence's logits, and one further task chooses among these
    candidates for all sequences.
    """
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


def lower_choose_each(lowering: Lowering, node: Node) -> None:
    """Emits one task that chooses the token of each sequence among the candidates that a linear
    layer's tasks have found.
    """
    params = ChooseEachParams(node.read(ChooseEachAttributes).tiles, node.inputs[0].shape[0])
    lowering.emit("choose_each", params, list(node.inputs), [(0,)])
