"""Linear layers of few rows on matrix units in the variant `roles`, on a GPU compared with
NumPy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os

import numpy as np
import pytest

import ark
from ark.backend.codegen.writer import write
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import DataType, bf16, fp16
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.plan.verify.streams import check_pieces
from ark.runtime import tables
from ark.runtime.executor import Executor
from ark.runtime.program import build
from ark.tasks.linear_form import narrows, reads_from_memory
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
# The blocks: (rows, columns, inner columns, outputs of the last layer, weights' type). The cases
# differ in the rows of weights that a stage holds (8 or 16, or parts of rows), in whether inputs
# stay in shared memory, and in whether the stage's rows divide the number of outputs.
SIZES = [
    (8, 2048, 8192, 3000, bf16),
    (3, 2048, 8192, 3072, bf16),
    (8, 4096, 14336, 1001, bf16),
    (5, 1056, 5504, 260, fp16),
    (2, 96, 224, 24, bf16),
    (2, 2048, 8192, 3001, bf16),
]


def block(rows: int, columns: int, inner: int, outputs: int, dtype: DataType) -> Model:
    """A gated block with its norm and residual, and a layer after another norm."""
    model = Model(0, 1)
    with use_model(model):
        x = ark.tensor([rows, columns], name="x")
        norms = [ark.parameter([columns], name=f"norm{i}") for i in range(2)]
        gate, up = (ark.parameter([inner, columns], dtype, name=n) for n in ("gate", "up"))
        down = ark.parameter([columns, inner], dtype, name="down")
        last = ark.parameter([outputs, columns], dtype, name="last")
        normed = ark.rmsnorm(x, norms[0], 1e-5)
        gated = ark.swiglu(ark.linear(normed, gate), ark.linear(normed, up))
        hidden = ark.add(x, ark.linear(gated, down))
        ark.linear(ark.rmsnorm(hidden, norms[1], 1e-5), last, name="result")
    return model


def planned(machine: ark.Machine, *sizes: object) -> Plan:
    task_plan = plan(block(*sizes).graph, machine)  # type: ignore[arg-type]
    verify([task_plan])
    assert machine_of(task_plan).variant.name == "roles"
    return task_plan


# `nox` compiles the largest case and the fp16 case.
@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[slow] * (i not in (2, 3))) for i, s in enumerate(SIZES)]
)
def test_all_layers_have_the_body_of_several_rows(sizes: tuple) -> None:
    """All linear layers of several rows use the body for several rows. Stages are parts of rows
    that fit into the ring, and the result of gate and up is read in place, without a copy to shared
    memory.
    """
    task_plan = planned(backend.machine("h100"), *sizes)
    machine = machine_of(task_plan)
    linear = [kinds.signature(task_plan, op) for op in task_plan.ops if op.kind == "linear"]
    assert len(linear) == 3 and all(narrows(sig, machine) for sig in linear)
    assert [reads_from_memory(sig) for sig in linear] == [False, sizes[0] * sizes[2] > 8192, False]
    assert from_json(to_json(task_plan)) == task_plan
    source = build(task_plan, machine, backend, "sm_90a").emitted.source.text
    assert "ark_linear_batch<" in source
    for task in (t for tasks in task_plan.phases[0].processors for t in tasks):
        for fetch in task.fetches:
            assert fetch.stage <= machine.stage_bytes


@pytest.mark.parametrize(
    ("rows", "columns", "stage"),
    [(2, 2048, (4, 1)), (3, 2048, (8, 2)), (2, 4096, (8, 4))],
)
def test_two_rows_take_whole_rows_of_weights(
    rows: int, columns: int, stage: tuple[int, int]
) -> None:
    """With two input rows, a stage has four whole rows of weights if they fit, loaded as a box. An
    input that stays in memory is multiplied in parts.
    """
    task_plan = planned(backend.machine("h100"), rows, columns, 8192, 512, bf16)
    linear = [op.params for op in task_plan.ops if op.kind == "linear"]
    assert [(p["rows"], p["split_k"]) for p in linear] == [stage, (16, 16), stage]


@pytest.mark.parametrize(("sizes", "in_flight"), [((1, 4096, 14336), 3), ((4, 2048, 8192), 2)])
def test_several_rows_have_no_more_copies_in_flight(sizes: tuple, in_flight: int) -> None:
    """Linear layers of several rows run in the kernel variant with few copies in flight; a single
    wide row runs in the variant with more copies in flight. The two variants have rings of 12
    slots.
    """
    task_plan = planned(backend.machine("h100"), *sizes, 512, bf16)
    variant = machine_of(task_plan).variant
    assert (variant.stages, variant.in_flight) == (12, in_flight)


@pytest.mark.parametrize(("rows", "warps"), [(2, 15), (4, 14), (5, 12), (8, 12)])
def test_more_than_four_rows_have_registers(rows: int, warps: int) -> None:
    """More than four input rows run in a variant with 12 warps, three in each of four partitions,
    whose threads have 168 registers. With a fourth warp in a partition they would have 128.
    """
    task_plan = planned(backend.machine("h100"), rows, 2048, 8192, 512, bf16)
    assert machine_of(task_plan).variant.warps == warps


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[3]])
def test_stream_brings_every_byte_once(sizes: tuple) -> None:
    """The fetch records (copies to shared memory that the device will make) together load each
    weight that the tasks multiply exactly once: as boxes if rows are whole lines of 128 bytes,
    otherwise as pieces of rows.
    """
    task_plan = planned(backend.machine("h100"), *sizes)
    emitted = write(task_plan, machine_of(task_plan), backend.dialect("sm_90a"))
    maps = [emitted.maps[code] for code in emitted.opcode]
    built = tables.build(
        task_plan,
        emitted.opcode,
        lambda b: b << 40,
        lambda c: 64 * c,
        maps,
        lambda op, _: (1 << 60) + (op << 8),
    )
    assert not any(int(a) >> 60 for a in built.tasks["operand"].ravel())
    seen = {b.id: np.zeros(b.nbytes // 16, np.int32) for b in task_plan.buffers}
    boxes = 0
    for record in built.fetches:
        form, size, address = (int(record[name]) for name in ("form", "bytes", "address"))
        if form >> 30 == 3:
            op = task_plan.ops[(address & (1 << 60) - 1) >> 8]
            (box,) = maps[op.id]
            row, line = form & (1 << 30) - 1, size >> 16
            assert size & 0xFFFF == np.prod(box.box) * 2 and box.fetched == 128
            weight = task_plan.tensors[op.operands[box.operand]]
            lines = seen[weight.buffer].reshape(weight.shape[0], -1, 8)
            lines[row : row + box.box[1], line : line + box.box[2]] += 1
            boxes += 1
            continue
        buffer, at = divmod(address, 1 << 40)
        count, pitch = (1, 0) if not form else ((form >> 24 & 31) + 1, (form & 0xFFFFFF) * 16)
        assert form == 0 or form >> 31 == 1
        for piece in range(count):
            begin = at + piece * pitch
            seen[buffer][begin // 16 : (begin + size) // 16] += 1
    for op in (op for op in task_plan.ops if op.kind == "linear"):
        assert (seen[task_plan.tensors[op.operands[1]].buffer] == 1).all()
    assert boxes == len(built.fetches) or (sizes == SIZES[3] and 0 < boxes < len(built.fetches))


def test_parts_of_rows_that_are_not_whole_are_refused() -> None:
    task_plan = planned(backend.machine("h100"), 8, 2048, 8192, 3000, bf16)
    for change in ({"rows": 15}, {"parts": 7}, {"stage": 8}, {"nbytes": 4096 + 16}):
        tasks = [list(own) for own in task_plan.phases[0].processors]
        task = next(t for t in tasks[0] if t.fetches and t.fetches[0].parts > 1)
        fetch = dataclasses.replace(task.fetches[0], **change)
        tasks[0][tasks[0].index(task)] = dataclasses.replace(task, fetches=(fetch,))
        phase = dataclasses.replace(task_plan.phases[0], processors=tuple(map(tuple, tasks)))
        with pytest.raises(PlanError, match="differ from those that tasks of kind"):
            verify([dataclasses.replace(task_plan, phases=(phase,))])
        with pytest.raises(PlanError, match="Expected: whole rows"):
            check_pieces("it", fetch)


@needs_gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_several_rows_agree_with_numpy(sizes: tuple) -> None:
    rows, columns, inner, outputs, dtype = sizes
    rng = np.random.default_rng(3)

    def rounded(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(dtype.numpy)

    given = {
        "x": rng.standard_normal((rows, columns)).astype(np.float32),
        "norm0": 1.0 + 0.1 * rng.standard_normal(columns),
        "norm1": 1.0 + 0.1 * rng.standard_normal(columns),
        "gate": rounded(2 * inner, columns),
        "down": rounded(columns, inner),
        "last": rounded(outputs, columns),
    }
    wide = {name: np.asarray(values).astype(np.float64) for name, values in given.items()}

    def normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight

    gate_and_up = (normed(wide["x"], wide["norm0"]) @ wide["gate"].T).reshape(rows, inner, 2)
    gated = gate_and_up[..., 0] / (1.0 + np.exp(-gate_and_up[..., 0])) * gate_and_up[..., 1]
    hidden = wide["x"] + gated @ wide["down"].T
    want = normed(hidden, wide["norm1"]) @ wide["last"].T
    with contextlib.closing(backend.open(0)) as device:
        task_plan = planned(device.machine, *sizes)
        # Weights that are adjacent in memory have a combined name.
        names = {t.name.split(".")[0].split("+")[0]: t.name for t in task_plan.tensors}
        with Executor(task_plan, backend, device) as executor:
            for name, values in given.items():
                executor.write(names[name], values)
            executor.start(3).wait(60)
            result = executor.find("result")
            size = rows * outputs * (8 if result.packet else 4)
            data = device.read(executor.tensor_address(result), size).view(np.float32)
            got = data.reshape(rows, outputs, -1)[..., 0].astype(np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < {"fp16": 2e-3, "bf16": 1e-2}[dtype.name]
    worst = np.abs(got - want).max() / np.abs(want).max()
    assert worst < {"fp16": 4e-3, "bf16": 3e-2}[dtype.name]
