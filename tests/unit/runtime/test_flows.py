"""Sequences of tasks in a processor's list that warps execute without synchronising in between
(ark.runtime.flows).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp32
from ark.lower.pipeline import plan
from ark.runtime.flows import flows

Chain = Callable[[ark.Tensor], ark.Tensor]


def _adds(x: ark.Tensor, count: int = 6) -> ark.Tensor:
    for _ in range(count):
        x = ark.add(x, 1.0)
    return x


def _runs(build: Chain, shape: list[int], dtype: DataType = fp32, machine: str = "h100") -> list:
    model = Model()
    with use_model(model):
        build(ark.tensor(shape, dtype, name="x"))
    result = plan(model.graph, registry.machine(machine), {"fuse": False})
    lists = [len(tasks) for tasks in result.phases[0].processors if tasks]
    assert len(lists) == 1, "the chain is for one processor"
    return sorted((first, len(flow)) for first, flow in flows(result).items())


CASES: dict[str, tuple[Chain, list[int], DataType, list[tuple[int, int]]]] = {
    "a chain": (_adds, [2048], fp32, [(0, 6)]),
    "as many as have room": (lambda x: _adds(x, 70), [2048], bf16, [(0, 64), (64, 6)]),
    "too few": (lambda x: _adds(x, 4), [2048], fp32, []),
    "an element that another thread has made": (
        lambda x: _adds(ark.add(_adds(x)[64:], 1.0), 5), [2048], fp32, [(0, 6), (7, 5)]
    ),
    "rows that start where a pack does, elsewhere": (
        lambda x: _adds(ark.add(_adds(x)[:, 64:128], 1.0), 5), [8, 256], fp32, [(0, 6), (6, 6)]
    ),
    "a row that all read": (
        lambda x: _adds(ark.add(y := _adds(x), y[0:1]), 5), [8, 256], fp32, [(0, 6), (7, 5)]
    ),
    "a row that nobody writes": (
        lambda x: _adds(ark.add(_adds(x), x[0:1]), 5), [8, 256], fp32, [(0, 12)]
    ),
    "packs of another size": (
        lambda x: _adds(ark.cast(_adds(x), bf16)), [2048], fp32, [(0, 6), (6, 7)]
    ),
    "another shape of the same bytes": (
        lambda x: _adds(ark.reshape(_adds(x), [4, 512])), [2048], fp32, [(0, 12)]
    ),
    "shared memory": (
        lambda x: _adds(ark.softmax(_adds(x))), [1, 2048], fp32, [(0, 6), (7, 6)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_runs_of_tasks_are_found(name: str) -> None:
    build, shape, dtype, wanted = CASES[name]
    assert _runs(build, shape, dtype) == wanted


def test_blocks_of_one_thread_have_no_flows() -> None:
    assert _runs(_adds, [2048], machine="cpu-1") == []
