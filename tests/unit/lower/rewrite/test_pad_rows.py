"""Which rows of odd length are stored at multiples of 16 bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ark
from ark.backend import registry
from ark.frontend.tensor import Tensor
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.lower.prepare import prepare
from ark.plan.verify import verify

MACHINES = ("h200", "mi300x")


def prepared(
    build: Callable[[Tensor], Tensor], columns: int, machine: str, seen: bool = False
) -> Graph:
    """The rewritten graph of a product with odd rows and what reads it. seen: True if the program's
    result belongs to the caller.
    """
    with ark.use_model(ark.Model()) as model:
        q, k = ark.tensor([256, 64], ark.bf16), ark.tensor([columns, 64], ark.bf16)
        result = build(ark.matmul(q, k, transpose_other=True))
    options = {"external": [result.ir.buffer.id]} if seen else {}
    return prepare(model.graph, registry.machine(machine), options).graph


def pitches(graph: Graph, columns: int) -> set[int]:
    """The distances between rows of `columns` elements."""
    tensors = (t for n in graph.nodes for t in (*n.inputs, *n.outputs))
    return {t.extents[-1] for t in tensors if t.shape[-1] == columns and t.shape[0] == 256}


def weighted(scores: Tensor) -> Tensor:
    """A product of weights that are computed from the scores."""
    weights = ark.tanh(ark.softmax(scores))
    return ark.matmul(weights, ark.tensor([scores.shape()[1], 64], ark.bf16))


def sums(scores: Tensor) -> Tensor:
    return ark.reduce_sum(ark.mul(ark.tanh(scores), scores), 1)


def flattened(scores: Tensor) -> Tensor:
    rows, columns = scores.shape()
    return ark.reduce_sum(ark.reshape(ark.relu(scores), [1, rows * columns]), 1)


def doubled(scores: Tensor) -> Tensor:
    return ark.cast(ark.mul(ark.cast(scores, ark.fp32), 2.0), ark.fp32)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("build", [weighted, sums])
def test_rows_that_products_access_are_padded(build: Callable[..., Tensor], machine: str) -> None:
    assert pitches(prepared(build, 197, machine), 197) == {200}


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_stay_dense(machine: str) -> None:
    """Rows are not padded if they are aligned already, if padding would make them much longer, if
    an op reads them in another shape, or if the caller sees a result that is computed from them
    element by element.
    """
    assert pitches(prepared(weighted, 200, machine), 200) == {200}
    assert pitches(prepared(sums, 33, machine), 33) == {33}
    assert 200 not in pitches(prepared(flattened, 197, machine), 197)
    assert pitches(prepared(doubled, 197, machine, seen=True), 197) == {197}


def test_cpu_needs_no_padding() -> None:
    assert pitches(prepared(weighted, 197, "cpu-2"), 197) == {197}


@pytest.mark.parametrize("machine", MACHINES)
def test_plans_with_padded_rows_are_verified(machine: str) -> None:
    """The gaps belong to the buffers: plans pass the verifier, and buffers have room for them."""
    with ark.use_model(ark.Model()) as model:
        q, k = ark.tensor([256, 64], ark.bf16), ark.tensor([197, 64], ark.bf16)
        weighted(ark.matmul(q, k, transpose_other=True))
    task_plan = plan(model.graph, registry.machine(machine))
    verify([task_plan])
    padded = [t for t in task_plan.tensors if t.shape[-1] == 197 and t.extents[-1] == 200]
    assert padded
    nbytes = {b.id: b.nbytes for b in task_plan.buffers}
    assert all(nbytes[t.buffer] == 256 * 200 * t.itemsize for t in padded)


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_are_padded_where_other_tensors_view_them(machine: str) -> None:
    """Views have numbers of their own, so that tensors and buffers are numbered differently."""
    with ark.use_model(ark.Model()) as model:
        q, k = ark.tensor([2, 128, 64], ark.bf16), ark.tensor([197, 64], ark.bf16)
        scores = ark.matmul(ark.reshape(q, [256, 64]), k, transpose_other=True)
        values = ark.reshape(ark.tensor([394, 32], ark.bf16), [197, 64])
        ark.matmul(ark.reshape(ark.softmax(ark.reshape(scores, [2, 128, 197])), [256, 197]), values)
    graph = prepare(model.graph, registry.machine(machine)).graph
    assert pitches(graph, 197) == {200}
