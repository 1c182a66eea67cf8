"""Sizes too large to execute: ops over 2^23 rows and more than 2^31 elements are planned and
verified for machine models. Sizes that overflow a count are refused, with the tensor's name, when
the tensor is created.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.errors import InvalidUsageError
from ark.ir.dtype import fp16, int8, int32, int64
from ark.lower.pipeline import plan
from ark.plan.verify import verify

ROWS, BIG, VAST = (1 << 23, 4), (1 << 16, 1 << 16), (3, 1 << 30)


def _t(shape: Any, dtype: Any = fp16) -> Any:
    return ark.tensor(list(shape), dtype)


OPS: dict[str, Callable[[Any], Any]] = {
    "add": lambda s: ark.add(_t(s), _t(s)),
    "bias": lambda s: ark.add(_t(s), _t(s[-1:])),
    "where": lambda s: ark.where(_t(s, ark.bool), _t(s), 0.0),
    "cast": lambda s: ark.cast(_t(s), int8),
    "iota": lambda s: ark.iota(s, 0, int64),
    "tril": lambda s: ark.tril(_t(s)),
    "transpose": lambda s: ark.transpose(_t(s), [1, 0]),
    "concat": lambda s: ark.concat([_t(s), _t(s)], 0),
    "gather": lambda s: ark.gather(_t(s), _t([8], int64), 0),
    "scatter": lambda s: ark.scatter_elements(_t(s), _t([4, s[1]], int32), _t([4, s[1]])),
    "sum": lambda s: ark.reduce_sum(_t(s), 0),
    "total": lambda s: ark.reduce_sum(_t(s), [0, 1]),
    "cumsum": lambda s: ark.cumsum(_t(s), 0),
    "softmax": lambda s: ark.softmax(_t(s)),
    "layernorm": lambda s: ark.layernorm(_t(s)),
    "rmsnorm": lambda s: ark.rmsnorm(_t(s), _t(s[-1:])),
    "argmax": lambda s: ark.argmax(_t(s)),
    "topk": lambda s: ark.topk(_t(s), 2),
    "logsumexp": lambda s: ark.logsumexp(_t(s), -1),
}
OF_ROWS = ("softmax", "layernorm", "rmsnorm", "argmax", "topk")
CASES = [
    *((name, shape, "cpu-2") for name in OPS for shape in (BIG, VAST)),
    *((name, ROWS, machine) for name in OF_ROWS for machine in ("cpu-2", "mi300x")),
    *((name, BIG, "h100") for name in ("sum", "total")),
]


def planned(build: Callable[[Any], Any], shape: Any, machine: str) -> None:
    ark.init(backend="cpu")
    build(shape)
    verify([plan(ark.Model.get_model().graph, registry.machine(machine))])


@pytest.mark.parametrize(("name", "shape", "machine"), CASES)
def test_huge_tensors_are_planned(name: str, shape: tuple[int, ...], machine: str) -> None:
    planned(OPS[name], shape, machine)


def test_rows_of_four_dimensions_are_few_tasks() -> None:
    """An op on rows of a tensor of four dimensions treats all rows as one matrix. With a task for
    each leading index it would have four million tasks.
    """
    planned(OPS["softmax"], (1 << 12, 1 << 10, 4, 2), "cpu-2")


@pytest.mark.parametrize("name", ["softmax", "layernorm", "argmax", "gather"])
def test_more_lines_than_a_coordinate_counts_are_cut(name: str) -> None:
    build = OPS[name]
    if name == "gather":
        build = lambda s: ark.gather(_t(s), _t([3], int64), 2)  # noqa: E731
    planned(build, (1 << 12, (1 << 20) + 3, 3), "cpu-2")


@pytest.mark.parametrize(
    ("build", "shape", "machine"),
    [
        (lambda s: ark.transpose(_t(s), [2, 1, 0]), (1 << 12, (1 << 20) + 3, 3), "cpu-2"),
        (lambda s: ark.transpose(_t(s), [1, 0, 2, 3, 4]), (92873, 13625, 2, 1, 6), "h100"),
        (OPS["cast"], (108, 31, 15, 11, 4345), "cpu-2"),
        (OPS["gather"], (3, 3, 264, 6670341), "mi300x"),
    ],
    ids=["transpose", "permutation", "cast", "gather"],
)
def test_dimensions_that_merge_stay_countable(
    build: Callable[[Any], Any], shape: tuple[int, ...], machine: str
) -> None:
    """If dimensions are merged, both a task's coordinate and the number of elements in a tile stay
    at most 2^30, so that they fit into the device's integers.
    """
    planned(build, shape, machine)


def test_many_of_a_row_are_chosen() -> None:
    planned(lambda s: ark.topk(_t(s), 70000), (2, 1 << 20), "cpu-2")


def test_size_that_cannot_be_counted_is_named() -> None:
    ark.init(backend="cpu")
    with pytest.raises(InvalidUsageError, match=r"4294967296\].* from 1 to 1879048191"):
        ark.tensor([2, 1 << 32])
    with pytest.raises(InvalidUsageError, match=r"random_uniform: the shape \[4294967296\]"):
        ark.random_uniform(BIG, 1)
