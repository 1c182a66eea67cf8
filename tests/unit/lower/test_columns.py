"""How the sums of columns are divided into tasks on an H200."""

from __future__ import annotations

import pytest

import ark
from ark.backend import registry
from ark.lower.pipeline import plan


@pytest.mark.parametrize(
    ("shape", "tasks"),
    [((1024, 768), [48]), ((1576, 768), [48, 1]), ((2048, 768), [96, 2]), ((2048, 2304), [72])],
)
def test_long_columns_are_divided(shape: tuple[int, int], tasks: list[int]) -> None:
    """Whole columns are read in rows of 32 or 64 bytes, parts of columns in rows of 128 bytes. The
    longer columns and the shorter rows are, the more is a second task for the sums of parts worth.
    """
    with ark.use_model(ark.Model()) as model:
        ark.reduce_sum(ark.tensor(list(shape), ark.bf16), 0)
    (phase,) = plan(model.graph, registry.machine("h200")).phases
    ops = [task.op for listed in phase.processors for task in listed]
    assert [ops.count(op) for op in sorted(set(ops))] == tasks
