"""The projection of a prompt's rows to queries, keys and values in the variant `matrix`. Its tiles
apply the rotary embedding and append to the KV caches. It is compiled, and on a GPU its results are
compared with NumPy's.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import fp16
from ark.machine import Machine
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from tests import kept
from tests.projection import Projection
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]

PROJECTIONS = [
    (Projection(512, 1024, 16, 4, 64, 700), None),
    pytest.param(Projection(200, 520, 3, 1, 64, 300, fp16), None, marks=slow),
    pytest.param(Projection(300, 1024, 6, 2, 128, 400), (128, 256), marks=slow),
    (Projection(300, 1024, 6, 2, 128, 400), (64, 64)),
    (Projection(48, 512, 8, 2, 64, 200, each=True), None),
    pytest.param(Projection(16, 256, 4, 2, 64, 200, each=True, page=40), None, marks=slow),
]


def projected(projection: Projection, cut: tuple[int, int] | None, machine: Machine) -> Plan:
    key = f"1x1x{projection.rows}x{projection.columns}x{projection.k}x2"
    return projection.plan(machine, cuts={key: [*cut, 1]} if cut else {})


@pytest.mark.parametrize(("projection", "cut"), PROJECTIONS)
def test_projection_is_rotated_where_its_sums_are(projection, cut) -> None:
    plan = projected(projection, cut, H100)
    (op,) = plan.ops
    assert cut is None or tuple(op.params["tile"]) == cut
    machine = machine_of(plan)
    emitted = write(plan, machine, backend.dialect("sm_90a"))
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "ark_matrix_store_rope<" in emitted.source.text.split("task_0_matmul(ArkCtx")[1]
    assert "serialized" not in binary.log


@needs_gpu
@pytest.mark.parametrize("position", [0, 33, 150])
@pytest.mark.parametrize(("projection", "cut"), PROJECTIONS)
def test_rotated_projection_equals_numpy(projection, cut, position) -> None:
    device = backend.open(0)
    given = projection.random(np.random.default_rng(position))
    with (
        contextlib.closing(device),
        Executor(projected(projection, cut, device.machine), backend, device) as executor,
    ):
        for name, array in given.items():
            executor.write(name, array)
        executor.write("position", projection.positions(position))
        executor.start(2).wait(60)
        right_of = projection.expected(given, position)
        got = {n: executor.read(n).copy() for n in right_of}
    for name, right in right_of.items():
        atol = np.sqrt(projection.k) * 2.0**-10
        np.testing.assert_allclose(
            got[name].astype(np.float64), right, rtol=2.0**-7, atol=atol, err_msg=name
        )
