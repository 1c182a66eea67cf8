"""Ops whose tiles the planner does not assign to processors: each processor takes its next tile
from an atomic counter at run time (ark.tasks.claimed).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp32, int32
from ark.lower import claims
from ark.lower.pipeline import plan
from ark.machine.capability import Capability
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks import elementwise

MATRIX_ROWS = 330
Build = Callable[[ark.Tensor], ark.Tensor]


def _gathered(x: ark.Tensor) -> ark.Tensor:
    """Returns the rows in reverse order."""
    last = x.shape()[0] - 1
    return ark.gather(x, ark.sub(last, ark.iota([last + 1], 0, int32)), 0)


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(e / e.sum(-1, keepdims=True))


def _normal(x: np.ndarray) -> np.ndarray:
    mean, spread = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return np.asarray((x - mean) / np.sqrt(spread + 1e-6))


CASES: dict[str, tuple[str, Build, Callable[[np.ndarray], np.ndarray], int, DataType]] = {
    "sums": ("elementwise", lambda x: ark.add(ark.mul(x, 2.0), x), lambda x: 3 * x, 200, fp32),
    "column": (
        "elementwise",
        lambda x: ark.mul(x, ark.reduce_max(x, 1)),
        lambda x: x * x.max(1, keepdims=True),
        200,
        bf16,
    ),
    "partial tile": ("elementwise", lambda x: ark.relu(x), lambda x: np.maximum(x, 0), 77, bf16),
    "softmax": (
        "row_norm",
        lambda x: ark.softmax(ark.add(x, x)),
        lambda x: _softmax(2 * x),
        256,
        bf16,
    ),
    "layernorm": ("row_norm", lambda x: ark.layernorm(x), _normal, 96, bf16),
    "odd rows": ("row_norm", lambda x: ark.softmax(x), _softmax, 77, bf16),
    "gather": ("gather", _gathered, lambda x: x[::-1], 64, bf16),
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowers the size from which an op's tiles are taken from a counter at run time."""
    monkeypatch.setattr(claims, "is_large", lambda nbytes, machine: nbytes >= 1 << 10)
    monkeypatch.setattr(elementwise, "CLAIM_BYTES", 1 << 10)


def _planned(model: Model, device: Device, claim: bool) -> Plan:
    machine = device.machine.with_processors(min(5, device.machine.processors))
    if claim:
        machine = machine.with_capabilities(Capability.CLAIMS)
    return plan(model.graph, machine, {"fuse": False})


def _run(planned: Plan, backend: Backend, device: Device, values: np.ndarray) -> np.ndarray:
    """Returns the output after several launches of several iterations."""
    with Executor(planned, backend, device) as executor:
        executor.write("x", values)
        for iterations in (1, 3, 8):
            executor.start(iterations).wait()
        return executor.read("out").astype(np.float64)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", CASES)
def test_claimed_tiles_equal_numpy(backend: str, case: str) -> None:
    kind, build, reference, columns, dtype = CASES[case]
    model = Model()
    with use_model(model):
        x = ark.tensor([MATRIX_ROWS, columns], dtype, name="x")
        ark.copy(build(x), name="out")
    values = np.random.default_rng(3).integers(-4, 4, (MATRIX_ROWS, columns)).astype(dtype.numpy)
    opened = registry.get(backend)
    with contextlib.closing(opened.open(0)) as device:
        lone = not device.machine.cooperative
        planned = _planned(model, device, True)
        verify([planned])
        claiming = {op.params["kind"] for op in planned.ops if op.claims is not None}
        assert claiming >= {"elementwise"} | ({kind} - {"row_norm"} if lone else {kind})
        reread = from_json(to_json(planned))
        assert to_json(reread) == to_json(planned)
        got = _run(reread, opened, device, values)
        fixed = _run(_planned(model, device, False), opened, device, values)
    want = reference(values.astype(np.float64))
    np.testing.assert_array_equal(got, fixed)
    np.testing.assert_allclose(
        got.reshape(want.shape), want, rtol=1e-6 if dtype == fp32 else 2**-7, atol=1e-3
    )


@pytest.mark.usefixtures("small")
def test_every_tile_is_computed_once_per_iteration(backend: str) -> None:
    """The op adds to its output in place in every iteration, so a tile that is computed twice or
    never makes the final sum wrong.
    """
    model = Model()
    with use_model(model):
        x = ark.tensor([MATRIX_ROWS, 64], fp32, name="x")
        ark.add(x, 1.0, x)
        ark.softmax(ark.tensor([MATRIX_ROWS, 64], bf16, name="y"), name="z")
    opened = registry.get(backend)
    with contextlib.closing(opened.open(0)) as device:
        planned = _planned(model, device, True)
        verify([planned])
        assert planned.ops[0].claims is not None
        with Executor(planned, opened, device) as executor:
            executor.write("x", np.zeros((MATRIX_ROWS, 64), np.float32))
            executor.start(5).wait()
            executor.start(20).wait()
            steps = [
                planned.counters[op.claims].step for op in planned.ops if op.claims is not None
            ]
            counted = executor.counters.values()
            assert [counted[op.claims] for op in planned.ops if op.claims is not None] == [
                20 * step for step in steps
            ]
            np.testing.assert_array_equal(executor.read("x"), np.float32(25))
