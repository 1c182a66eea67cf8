"""Rows that bulk copies load to shared memory: when they are used, and on a GPU their results
compared with NumPy's.
"""

from __future__ import annotations

import contextlib
import os
import re

import numpy as np
import pytest

import ark
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp32
from ark.lower.pipeline import plan
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend
from cuda.bindings import nvrtc

from tests import kept

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
OPS = ("softmax", "log_softmax", "layernorm", "rmsnorm")


def expected(name: str, x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    x = x.astype(np.float64)
    if name in ("softmax", "log_softmax"):
        e = np.exp(x - x.max(-1, keepdims=True))
        fractions = e / e.sum(-1, keepdims=True)
        return np.asarray(fractions if name == "softmax" else np.log(fractions))
    centred = x - x.mean(-1, keepdims=True) if name == "layernorm" else x
    factor = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    return np.asarray(centred * factor * (weight if name == "rmsnorm" else 1.0))


def planned(machine: ark.Machine, name: str, shape: list[int], dtype: DataType) -> Plan:
    model = Model()
    with use_model(model):
        x = ark.tensor(shape, dtype, name="x")
        outputs = {
            "softmax": lambda: ark.softmax(x),
            "log_softmax": lambda: ark.log_softmax(x),
            "layernorm": lambda: ark.layernorm(x, 1e-3),
            "rmsnorm": lambda: ark.rmsnorm(x, ark.parameter(shape[-1:], dtype, name="w"), 1e-3),
        }[name]()
        ark.copy(outputs, name="out")
    result = plan(model.graph, machine.with_processors(2), {"fuse": False})
    verify([result])
    return result


def source(task_plan: Plan) -> str:
    machine = machine_of(task_plan, 0)
    return write(task_plan, machine, backend.dialect(machine.arch)).source.text


# The cases: (shape, True if the rows are loaded by bulk copies ahead of their use). Rows are not
# streamed if there are too few of them, if their length is not a multiple of 16 bytes, or if they
# are short.
FORMS = [
    *(((40, 4096), True), ((40, 4000), True), ((4, 4096), False), ((40, 4090), False)),
    ((96, 1000), True),  # a row is a warp's, and a block has more warps than barriers
]


LONG = [40, 32000]


@pytest.mark.parametrize(("shape", "streamed"), [*FORMS, ((400, 64), False)])
def test_long_rows_are_streamed_where_they_are_many(shape: tuple[int, int], streamed: bool) -> None:
    row_plan = planned(backend.machine("h100"), "softmax", list(shape), fp32)
    assert ("ark_row_stream<" in source(row_plan)) == streamed


def test_rows_of_small_elements_stay_in_registers() -> None:
    row_plan = planned(backend.machine("h100"), "softmax", [40, 4096], bf16)
    text = source(row_plan)
    assert "ark_row_stream<" not in text and "ark_row_norm<" in text


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=lambda d: d.name)
def test_rows_too_long_for_registers_are_read_once(dtype: DataType) -> None:
    """log_softmax of rows of 32,000 elements reads each row once: the next row is loaded to shared
    memory while the current one is computed.
    """
    task_plan = planned(backend.machine("h200"), "log_softmax", LONG, dtype)
    machine = machine_of(task_plan, 0)
    emitted = write(task_plan, machine, backend.dialect("sm_90a"))
    assert "ark_row_stream<" in emitted.source.text
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    spills = re.findall(r"(\d+) bytes spill stores", binary.log)
    assert spills and max(map(int, spills)) == 0


def test_weights_leave_no_registers_for_longer_rows() -> None:
    row_plan = planned(backend.machine("h200"), "rmsnorm", LONG, fp32)
    assert "ark_row_stream<" not in source(row_plan)


def test_no_machine_streams_them_without_the_copy_unit() -> None:
    row_plan = planned(backend.machine("a100"), "softmax", [40, 4096], fp32)
    assert "ark_row_stream<" not in source(row_plan)


def test_body_compiles() -> None:
    task_plan = planned(backend.machine("h100"), "rmsnorm", [40, 4000], fp32)
    machine = machine_of(task_plan, 0)
    emitted = write(task_plan, machine, backend.dialect("sm_90a"))
    assert "ark_row_stream<" in emitted.source.text
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert " 0 bytes spill stores" in binary.log


def test_warp_alone_asks_for_no_barrier_of_its_block() -> None:
    """If a team that processes a row is one warp, it synchronises without a named barrier, of which
    a block has only 16.
    """
    task_plan = planned(backend.machine("h100"), "softmax", [96, 1000], fp32)
    machine = machine_of(task_plan, 0)
    emitted = write(task_plan, machine, backend.dialect("sm_90a"))
    text = emitted.source.text.encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], [])
    options = [b"-arch=compute_90a", b"-std=c++17", b"-default-device"]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == 0
    code = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, code)
    asked = re.findall(r"barrier\.sync\s+([^,;]+)", code.decode())
    assert asked and all(name.isdigit() for name in asked)


@needs_gpu
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=lambda d: d.name)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [*(s for s, streamed in FORMS if streamed), tuple(LONG)])
def test_long_rows_agree_with_numpy(shape: tuple[int, int], name: str, dtype: DataType) -> None:
    rng = np.random.default_rng(7)
    x, w = (rng.standard_normal(s).astype(dtype.numpy) for s in (shape, shape[1]))
    with contextlib.closing(backend.open(0)) as device:
        task_plan = planned(device.machine, name, list(shape), dtype)
        streamed = name != "rmsnorm" if shape == tuple(LONG) else dtype == fp32
        assert ("ark_row_stream<" in source(task_plan)) == streamed
        with Executor(task_plan, backend, device) as executor:
            executor.write("x", x)
            if name == "rmsnorm":
                executor.write("w", w)
            executor.start(3).wait()
            got = executor.read("out").reshape(shape).astype(np.float64)
    want = expected(name, x.astype(np.float64), w.astype(np.float64), 1e-3)
    tolerance = 1e-5 if dtype == fp32 else 2**-7
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
