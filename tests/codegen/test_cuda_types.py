"""Types, ranks and many operands drawn by hypothesis, as in tests/backend/test_types.py. They are
planned, verified and compiled for a GPU that need not exist.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

import ark
from ark.backend.codegen import layout
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.program import build
from tests.cases import types as cases
from tests.opcheck import Case
from tests.slow import examples, slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

DRAWN = settings(
    phases=[Phase.explicit, Phase.generate],
    max_examples=examples(3),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def compiled(drawn: list[Case]) -> Plan:
    machine, model = machines.MODELS["h100"], Model()
    with use_model(model):
        kept = [
            case.build(*(ark.tensor(list(a.shape), dtype) for a, dtype in case.inputs))
            for case in drawn
        ]
    planned = plan(model.graph, machine)
    verify([planned])
    assert kept and build(planned, machine, backend, machine.arch).binary.data[:4] == b"\x7fELF"
    return planned


@given(drawn=cases.movements())
@DRAWN
def test_movements_compile(drawn: list[Case]) -> None:
    types = {t.dtype for t in compiled(drawn).tensors}
    assert {"bool", "int64", "int4", "uint4", "fp4"} <= types
    assert max(array.ndim for case in drawn for array, _ in case.inputs) > 4


def test_squares_of_wide_elements_fit_into_shared_memory() -> None:
    """A transpose of 64-bit elements compiles: its tile, whose rows are padded by an element, fits
    into shared memory.
    """
    array = np.zeros((130, 130), np.int64)

    def build(t: ark.Tensor) -> ark.Tensor:
        return ark.transpose(t, (1, 0), output=ark.tensor((130, 130), ark.int64))

    compiled([Case("transposed", [(array, ark.int64)], build, np.transpose)])


@slow
@given(drawn=cases.elementwise())
@DRAWN
def test_elementwise_ops_compile(drawn: list[Case]) -> None:
    assert max(len(op.operands) for op in compiled(drawn).ops) > layout.RECORD_OPERANDS


@slow
@given(drawn=cases.reductions())
@DRAWN
def test_reductions_compile(drawn: list[Case]) -> None:
    compiled(drawn)
