"""Attention whose keys and values are strided by rows: the tensor maps describe the strides, and
NVRTC compiles the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import ark
from ark.backend.codegen.writer import write
from ark.ir.dtype import bf16
from ark.lower.pipeline import plan as make_plan
from ark.plan.kind import signature
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines
from ark_cuda.tasks import attention_tiles

from ark.backend.protocol import Target
from tests import kept
from tests.slow import slow

BATCH, ROWS, HEADS, WIDTH = 2, 256, 4, 64


def planned(causal: bool, mask: Sequence[int] = (), added: bool = False) -> Plan:
    """Returns a plan of attention whose queries, keys and values are the three parts of one tensor
    (batch, rows, 3 * heads * width), the output of a single projection.
    """
    model = ark.Model(0, 1)
    with ark.use_model(model):
        x = ark.tensor((BATCH, ROWS, 3, HEADS, WIDTH), bf16)
        parts = ark.transpose(x, [2, 0, 3, 1, 4])
        q, k, v = (ark.reshape(parts[i : i + 1], [BATCH, HEADS, ROWS, WIDTH]) for i in range(3))
        scores = ark.matmul(q, k, transpose_other=True)
        if causal:
            rows, columns = (ark.iota((ROWS, ROWS), d, ark.int32) for d in (0, 1))
            scores = ark.where(ark.less_equal(columns, rows), scores, float("-inf"))
        if mask:
            given = ark.tensor(tuple(mask), bf16 if added else ark.bool)
            scores = ark.add(scores, given) if added else ark.where(given, scores, -1e9)
        attended = ark.transpose(ark.matmul(ark.softmax(scores), v), [0, 2, 1, 3])
        ark.copy(attended, ark.tensor(attended.shape(), bf16))
    plan = make_plan(model.graph, machines.MODELS["h100"])
    verify([plan])
    return plan


def test_boxes_are_a_heads_columns_of_rows() -> None:
    """The tensor maps of queries, keys and values have the strides in bytes of rows, heads and
    batch.
    """
    plan = planned(False)
    (op,) = (o for o in plan.ops if o.kind == "attention_tiles")
    q, k, v = attention_tiles.Warpgroups().maps(signature(plan, op), machine_of(plan))
    row, head, batch = 3 * HEADS * WIDTH * 2, WIDTH * 2, ROWS * 3 * HEADS * WIDTH * 2
    assert (q.dims, q.strides) == ((WIDTH, HEADS, ROWS, BATCH), (head, row, batch))
    for each in (k, v):
        assert (each.dims, each.strides) == ((WIDTH, ROWS, HEADS, BATCH), (row, head, batch))


@pytest.mark.parametrize(
    ("causal", "mask", "added"),
    [
        (False, (), False),
        pytest.param(True, (), False, marks=slow),
        pytest.param(False, (BATCH, 1, 1, ROWS), False, marks=slow),
        (True, (HEADS, ROWS, ROWS), True),
    ],
)
def test_nvrtc_compiles_it(causal: bool, mask: Sequence[int], added: bool) -> None:
    """Attention compiles with the sums of a warpgroup in registers: nothing is spilled in
    its loop.
    """
    plan = planned(causal, mask, added)
    machine = machine_of(plan)
    emitted = write(plan, machine, backend.dialect("sm_90a"))
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "ark_attention_load<" in emitted.source.text
    assert "serialized" not in binary.log
