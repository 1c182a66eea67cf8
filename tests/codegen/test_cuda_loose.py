"""Bodies that read inputs at any element: slices whose rows are not aligned, gathers, updates at
indices. The device code of CUDA runs on the host and is compared with NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType
from ark.lower.pipeline import plan
from ark.machine import Machine

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda.machines import MODELS

from tests.block_on_host import Block

BEGINS = range(9)


def computed(
    folder: Path,
    inputs: Sequence[tuple[np.ndarray, DataType]],
    build: Callable[..., object],
    machine: Machine = MODELS["h200"],
) -> list[tuple[str, np.ndarray]]:
    """The kind and the result of each op that `build` adds, in order."""
    model = Model()
    with use_model(model):
        built = build(
            *(ark.tensor(list(a.shape), d, name=f"in{i}") for i, (a, d) in enumerate(inputs))
        )
    block = Block(plan(model.graph, machine, {"fuse": False}), folder)
    del built
    for i, (array, _) in enumerate(inputs):
        at = next(t.buffer for t in block.plan.tensors if t.name == f"in{i}")
        block.memory[at][: array.nbytes] = array.reshape(-1).view(np.uint8)
    results = []
    for op in block.plan.ops:
        block.run(op)
        results.append((op.kind, block.operand(op, -1).copy()))
    return results


def values(dtype: DataType, *shape: int) -> np.ndarray:
    kind: Any = dtype.numpy
    return np.random.default_rng(len(shape)).integers(0, 120, shape).astype(kind)


@pytest.mark.parametrize("dtype", [ark.fp32, ark.bf16, ark.uint8, ark.int64], ids=str)
@pytest.mark.parametrize("columns", [103, 104])
def test_slices_begin_at_any_element(tmp_path: Path, dtype: DataType, columns: int) -> None:
    x = values(dtype, 19, columns)
    results = computed(
        tmp_path, [(x, dtype)], lambda t: [ark.copy(t[:, b : b + 88]) for b in BEGINS]
    )
    for begin, (kind, actual) in zip(BEGINS, results, strict=True):
        assert kind == "elementwise"
        np.testing.assert_array_equal(actual, x[:, begin : begin + 88])


def test_sums_with_slices(tmp_path: Path) -> None:
    """Adds a slice, whose rows are not aligned to vectors, and a tensor whose rows are."""
    x, y = values(ark.fp32, 13, 71), values(ark.fp32, 13, 64)
    ((_, actual),) = computed(
        tmp_path, [(x, ark.fp32), (y, ark.fp32)], lambda a, b: ark.add(a[:, 5:69], b)
    )
    np.testing.assert_array_equal(actual, x[:, 5:69] + y)


def test_several_rounds(tmp_path: Path) -> None:
    """Copies so large that a thread has several rounds of loads: it loads its next vectors, or
    single elements, while it stores the current ones. The row of bytes ends with single elements;
    rows of 601 elements have no aligned vectors.
    """
    x, y = np.resize(values(ark.uint8, 4099), 9_000_003), values(ark.bf16, 1500, 607)
    (_, one), (_, two) = computed(
        tmp_path, [(x, ark.uint8), (y, ark.bf16)], lambda s, t: [ark.copy(s), ark.copy(t[:, 3:604])]
    )
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(two, y[:, 3:604])


@pytest.mark.parametrize("columns", [33, 64])
def test_gathers(tmp_path: Path, columns: int) -> None:
    x = values(ark.fp32, 40, columns)
    rows = np.random.default_rng(1).integers(-40, 40, 700)
    each = np.random.default_rng(2).integers(-40, 40, (37, columns))
    inputs = [(x, ark.fp32), (rows, ark.int64), (each, ark.int64)]
    results = computed(
        tmp_path, inputs, lambda t, i, j: [ark.gather(t, i, 0), ark.gather_elements(t, j, 0)]
    )
    assert [kind for kind, _ in results] == ["gather", "gather"]
    np.testing.assert_array_equal(results[0][1].reshape(700, columns), x[rows])
    np.testing.assert_array_equal(results[1][1], np.take_along_axis(x, each % 40, 0))


@pytest.mark.parametrize("columns", [5, 160, 512])
def test_updates_at_rows(tmp_path: Path, columns: int) -> None:
    """Scatters whose tasks divide the updated rows, and whose warps apply different updates at the
    same time.
    """
    x, new = values(ark.fp32, 300, columns), values(ark.fp32, 1500, columns)
    rows = np.random.default_rng(3).integers(-300, 300, (1500, 1))
    inputs = [(x, ark.fp32), (rows, ark.int64), (new, ark.fp32)]
    (*_, (kind, actual)) = computed(
        tmp_path, inputs, lambda t, i, u: ark.scatter_elements(t, i, u, 0, "add")
    )
    assert kind == "scatter"
    expected = x.copy()
    np.add.at(expected, rows[:, 0], new)
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    ("columns", "many", "dtype", "function"),
    [
        (3, 333, ark.fp32, "add"),
        (40, 333, ark.bf16, "add"),
        (40, 333, ark.int64, "add"),
        (40, 7, ark.fp32, "set"),  # a thread applies the updates of a column
        (40, 333, ark.fp32, "set"),  # the last update of an element remains
        (4096, 333, ark.fp32, "set"),  # a warp has several columns
    ],
    ids=str,
)
def test_updates_of_columns(
    tmp_path: Path, columns: int, many: int, dtype: DataType, function: str
) -> None:
    """Each column has its own indices, and updates of an element are applied in order."""
    x, new = values(dtype, 50, columns), values(dtype, many, columns)
    rows = np.random.default_rng(3).integers(-50, 50, (many, columns))
    inputs = [(x, dtype), (rows, ark.int64), (new, dtype)]
    (*_, (kind, actual)) = computed(
        tmp_path, inputs, lambda t, i, u: ark.scatter_elements(t, i, u, 0, function)
    )
    assert kind == "scatter"
    expected = x.copy()
    for at, more in zip(rows, new, strict=True):
        place = (at, np.arange(columns))
        expected[place] = more if function == "set" else expected[place] + more
    np.testing.assert_array_equal(actual, expected)


def test_updates_of_more_columns_than_shared_memory_has_room_for(tmp_path: Path) -> None:
    x, new = values(ark.fp32, 3, 30000), values(ark.fp32, 16, 30000)
    rows = np.random.default_rng(3).integers(-3, 3, new.shape)
    inputs = [(x, ark.fp32), (rows, ark.int64), (new, ark.fp32)]
    (*_, (kind, actual)) = computed(
        tmp_path,
        inputs,
        lambda t, i, u: ark.scatter_elements(t, i, u, 0, "add"),
        MODELS["h200"].with_processors(1),
    )
    assert kind == "scatter"
    expected = x.copy()
    for at, more in zip(rows, new, strict=True):
        expected[at, np.arange(30000)] += more
    np.testing.assert_array_equal(actual, expected)
