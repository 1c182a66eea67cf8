"""Sequences of tasks between which the warps of a block need not synchronise
(ark.runtime.flows).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp32
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.runtime.flows import flows
from tests.emulated import few_emulated

VECTOR_SIZE = 1536
Chain = Callable[[ark.Tensor], ark.Tensor]


def _adds(x: ark.Tensor) -> ark.Tensor:
    for _ in range(9):
        x = ark.add(x, 1.0)
    return x


def _shifted(x: ark.Tensor) -> ark.Tensor:
    """Two chains of additions. The first task of the second chain reads elements that other threads
    wrote, because its operand is shifted by some elements.
    """
    return _adds(ark.add(_adds(x)[8:], 1.0))


def _rows(x: ark.Tensor) -> ark.Tensor:
    """A chain of additions, a softmax, in which threads add the partial sums of other threads, and
    another chain.
    """
    return _adds(ark.softmax(ark.reshape(_adds(x), [2, VECTOR_SIZE // 2])))


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


CASES: dict[str, tuple[Chain, Callable[[np.ndarray], np.ndarray], int]] = {
    "adds": (_adds, lambda x: x + 9, 9),
    "shifted": (_shifted, lambda x: x[8:] + 19, 18),
    "rows": (_rows, lambda x: _softmax((x + 9).reshape(2, -1)) + 9, 18),
}


@pytest.mark.parametrize("dtype", few_emulated((fp32, bf16), bf16), ids=lambda d: d.name)
@pytest.mark.parametrize("case", CASES)
def test_chains_of_small_ops_equal_numpy(backend: str, case: str, dtype: DataType) -> None:
    build, reference, going_on = CASES[case]
    model = Model()
    with use_model(model):
        x = ark.tensor([VECTOR_SIZE], dtype, name="x")
        ark.copy(build(x), name="out")
    values = np.random.default_rng(3).integers(-4, 4, VECTOR_SIZE).astype(dtype.numpy)
    opened = registry.get(backend)
    with contextlib.closing(opened.open(0)) as device:
        planned = plan(model.graph, device.machine, {"fuse": False})
        verify([planned])
        lone = not device.machine.cooperative
        assert lone or sum(map(len, flows(planned).values())) >= going_on
        machine = machine_of(planned, 0)
        source = write(planned, machine, opened.dialect(device.machine.arch)).source.text
        assert ("#define ARK_FLOWS " in source) != lone
        with Executor(planned, opened, device) as executor:
            executor.write("x", values)
            executor.start(3).wait()
            got = executor.read("out").astype(np.float64)
    want = reference(values.astype(np.float64))
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=1e-6 if dtype == fp32 else 2**-7)
