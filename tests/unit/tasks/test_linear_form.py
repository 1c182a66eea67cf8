"""The number of processors that share a linear layer of few rows, on machines whose waiting blocks
prefetch weights.
"""

from __future__ import annotations

import pytest

from ark.backend import registry
from ark.ir.dtype import DataType, bf16, fp16
from ark.ir.graph import Graph
from ark.tasks.linear_form import dealt


@pytest.mark.parametrize(
    ("rows", "weights", "dtype", "processors"),
    [
        (1, 2048, bf16, 101),  # a third of the processors has all of 8 MB in flight
        (8, 2048, bf16, 101),  # rows on matrix units prefetch like one row
        (8, 8192, bf16, 256),
        (9, 2048, bf16, 304),
        (8, 2048, fp16, 304),  # these are not multiplied on matrix units
    ],
)
def test_layers_that_prefetch_leave_processors_free(
    rows: int, weights: int, dtype: DataType, processors: int
) -> None:
    weight = Graph().tensor((weights, 2048), dtype, arena="parameter")
    assert dealt(rows, weight, registry.machine("mi300x")) == processors
