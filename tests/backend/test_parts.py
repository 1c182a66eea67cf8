"""A product whose k is split into parts, followed by a residual and a norm of the sum, on every
backend. It is planned for the kernel variant `matrix` (products computed by warpgroups), which this
test adds to the CPU's machine description.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.devices import Device
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.projection import with_matrix

RMSNORM_EPS = 1e-5


def machine_of(device: Device, backend: str) -> Machine:
    return with_matrix(device.machine) if backend == "cpu" else device.machine


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "columns", "parts"), [(130, 192, 2), (519, 2048, 4)])
def test_norm_of_a_sum_of_parts_equals_numpy(
    backend: str, rows: int, columns: int, parts: int, residual: bool
) -> None:
    depth, rng = 256, np.random.default_rng(rows)
    # The numbers have few bits, so they stay exact when the product rounds its operands to the
    # weights' type.
    x, w = (np.round(rng.standard_normal((n, depth)) * 8) / 32 for n in (rows, columns))
    r, scale = rng.standard_normal((rows, columns)), 1 + rng.standard_normal(columns) / 8
    with contextlib.closing(registry.get(backend).open(0)) as device:
        machine = machine_of(device, backend)
        if not any(v.name == "matrix" for v in machine.variants):
            pytest.skip("the device has no variant for large products")
        model = Model()
        with use_model(model):
            given = {"x": (x, ark.fp32), "w": (w, ark.bf16), "scale": (scale, ark.fp32)}
            if residual:
                given["r"] = (r, ark.fp32)
            t = {
                name: ark.Tensor(model.graph.tensor(a.shape, kind, arena="state", name=name), model)
                for name, (a, kind) in given.items()
            }
            product = ark.linear(t["x"], t["w"])
            total = ark.add(t["r"], product) if residual else product
            ark.rmsnorm(total, t["scale"], eps=RMSNORM_EPS, name="normed")
            ark.mul(total, 2.0, name="doubled")
        key = f"1x1x{rows}x{columns}x{depth}x2"
        options = {"variant": "matrix", "cuts": {key: [128, 64, parts]}}
        planned = make_plan(model.graph, machine, options)
        verify([planned])
        assert "combine_norm" in {op.kind for op in planned.ops}
        with Executor(planned, registry.get(backend), device) as executor:
            for name, (array, kind) in given.items():
                executor.write(name, array.astype(kind.numpy))
            executor.start(2).wait(60)
            got = {name: executor.read(name) for name in ("normed", "doubled")}
    want = x @ w.T + (r if residual else 0.0)
    normed = want / np.sqrt((want**2).mean(axis=1, keepdims=True) + RMSNORM_EPS) * scale
    np.testing.assert_allclose(got["doubled"].reshape(want.shape), 2 * want, atol=2e-4)
    np.testing.assert_allclose(got["normed"].reshape(want.shape), normed, atol=2e-4)
