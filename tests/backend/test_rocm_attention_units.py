"""Attention of many rows on AMD's matrix units, executed on the emulator with all checks and
compared with torch, and compiled for every architecture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from ark_rocm import backend, compiler
from ark_rocm.tasks import attention_units

import ark
from ark.backend.codegen.writer import write
from ark.ir.dtype import DataType, bf16, fp16, fp32
from ark.lower.pipeline import plan as make_plan
from ark.machine.capability import Capability
from ark.plan.kind import signature
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, PlanOp
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.attended import PAGES, WIDE, expected, given, planned
from tests.cases.attend import FORMS, attention, by_torch
from tests.cases.attention import SHAPES, TILES, Shape
from tests.cases.rocm_compile import assembly, fact, machine_for
from tests.opcheck import compare
from tests.slow import in_turns, slow

emulator = pytest.importorskip("ark_rocm_emulator")

pytestmark = pytest.mark.emulated("slow")

SERVED = ("gfx942", "gfx1100", "gfx950")
# Shapes in which a block's queries fill whole tiles.
WHOLE = (
    Shape(600, 300, 8, 2, 32, position=0),
    Shape(300, 200, 16, 16, 64, causal=False),
)


def layout_of(plan: Plan, op: PlanOp) -> attention_units.Layout:
    layout = attention_units.layout_of(signature(plan, op), machine_of(plan))
    assert layout is not None
    return layout


@pytest.fixture
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(emulator.emulated(request.param, checks=1, compute_units=4))
        yield request.param


@pytest.mark.parametrize(
    ("arch", "shapes", "dtype"),
    in_turns(
        SERVED,
        [
            *((SHAPES, bf16), (SHAPES, fp16), (WIDE, bf16), (WIDE, fp16)),
            *((PAGES, fp16), (PAGES, bf16), (WHOLE, bf16), (WHOLE, bf16), (TILES, bf16)),
            *((WIDE[:3], fp32), (SHAPES, fp32), (PAGES[:4], fp32)),
        ],
        count=6,
    ),
    indirect=["arch"],
)
def test_all_masks_give_torchs_results(arch: str, shapes: Sequence[Any], dtype: DataType) -> None:
    """Attention with all kinds of masks gives torch's results. It runs twice, so that the second
    iteration starts with used shared memory. Queries of fp32 have keys in bf16.
    """
    cached = bf16 if dtype is fp32 else dtype
    with contextlib.closing(backend.open(0)) as device:
        plan, cases = planned(shapes, device.machine, dtype, cached=cached)
        with Executor(plan, backend, device) as executor:
            for case, named, op in cases:
                layout_of(plan, op)
                for name, array in given(case, named).items():
                    executor.write(name, array)
            executor.start(2).wait()
            for i, (case, *_) in enumerate(cases):
                want = expected(case)
                got = executor.read(f"{i}.out").reshape(want.shape)
                compare(f"{arch}: {case.name}", got, want, dtype, case.tolerance)


# Shapes in which a wave walks so many blocks of keys that it loads whole ones by scalar addresses:
# an even and an odd number of blocks, of which the last one is not whole.
MANY = (Shape(1024, 470, 1, 1, 64, causal=False), Shape(1024, 420, 1, 1, 128, causal=False))


@pytest.mark.parametrize("arch", ["gfx950", pytest.param("gfx942", marks=slow)], indirect=True)
def test_many_blocks_of_keys_give_torchs_results(arch: str) -> None:
    with contextlib.closing(backend.open(0)) as device:
        plan, cases = planned(MANY, device.machine, bf16)
        with Executor(plan, backend, device) as executor:
            for shape, (case, named, op) in zip(MANY, cases, strict=True):
                layout = layout_of(plan, op)
                assert shape.context // (layout.groups * layout.keys) >= 6
                for name, array in given(case, named).items():
                    executor.write(name, array)
            executor.start(1).wait()
            for i, (case, *_) in enumerate(cases):
                want = expected(case)
                got = executor.read(f"{i}.out").reshape(want.shape)
                compare(f"{arch}: {case.name}", got, want, bf16, case.tolerance)


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx1100", marks=slow)], indirect=True)
def test_masked_rows_of_the_cache_are_not_multiplied(arch: str) -> None:
    """Cache rows beyond the position, which may hold any bits, do not affect the result."""
    shape = Shape(40, 300, 2, 1, 64, position=77)
    with contextlib.closing(backend.open(0)) as device:
        plan, ((case, named, _),) = planned([shape], device.machine, bf16)
        with Executor(plan, backend, device) as executor:
            arrays = given(case, named)
            for name in named[1:3]:
                arrays[name][:, 77 + 40 :] = np.nan
            for name, array in arrays.items():
                executor.write(name, array)
            executor.start(1).wait()
            want = expected(case)
            got = executor.read("0.out").reshape(want.shape)
    compare(arch, got, want, bf16, case.tolerance)


@pytest.mark.parametrize("arch", ["gfx1100", pytest.param("gfx942", marks=slow)], indirect=True)
@pytest.mark.parametrize("name", ["columns, causal", pytest.param("grouped", marks=slow)])
def test_product_softmax_and_product_become_one_op(arch: str, name: str) -> None:
    """A product, a softmax and a product are planned as one attention op, which reads the rows of
    all heads in place.
    """
    form, model = FORMS[name], ark.Model(0, 1)
    with contextlib.closing(backend.open(0)) as device, ark.use_model(model):
        ark.copy(
            attention(form, ark.tensor(form.shape, bf16, name="x")),
            ark.tensor(by_torch(form, np.zeros(form.shape)).shape, bf16, name="out"),
        )
        plan = make_plan(model.graph, device.machine)
        verify([plan])
        (op,) = (op for op in plan.ops if op.kind == "attention_tiles")
        assert op.params["by_rows"] and not {"matmul", "row_norm"} & {o.kind for o in plan.ops}
        layout_of(plan, op)
        with Executor(plan, backend, device) as executor:
            array = np.random.default_rng(3).standard_normal(form.shape).astype(bf16.numpy)
            (buffer,) = (b.name for b in plan.buffers if b.name.startswith("x."))
            executor.write(buffer, array)
            executor.start(1).wait()
            want = by_torch(form, array)
            compare(arch, executor.read("out").reshape(want.shape), want, bf16)


WIDTHS, ROWS = range(8, 257, 8), (8192, 2048)  # tiles of all rows; tiles in which waves share keys
SOME = (
    *(("gfx942", 128, 8192), ("gfx942", 256, 8192), ("gfx942", 160, 2048)),
    *(("gfx1100", 64, 8192), ("gfx1100", 248, 8192), ("gfx950", 192, 8192)),
)
SOME_PARTS = (("gfx942", 128, 8192), ("gfx1100", 128, 8192), ("gfx950", 128, 8192))


def compiled(
    arch: str, width: int, rows: int, dtype: DataType, patch: pytest.MonkeyPatch
) -> tuple[attention_units.Layout, str]:
    """Compiles attention with all masks. Returns its layout and the assembly."""
    patch.setattr(compiler, "_hiprtc_version", lambda: "")
    shape = Shape(rows, rows, 16, 8, width, position=0, window=1000, softcap=20.0, sinks=True)
    plan, ((*_, op),) = planned([shape], machine_for(arch), dtype, cached=bf16)
    layout = layout_of(plan, op)
    assert layout.slabs * layout.groups * layout.unit >= op.params["rows"]
    emitted = write(plan, machine_of(plan), backend.dialect(arch))
    assert layout.nbytes <= emitted.scratch_bytes
    return layout, assembly(emitted.source, arch)


@pytest.mark.parametrize(
    ("arch", "width", "rows"),
    [
        pytest.param(*case, marks=[slow] * (case not in SOME))
        for case in itertools.product(SERVED, WIDTHS, ROWS)
    ],
)
def test_sums_and_scores_stay_in_registers(
    arch: str, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = compiled(arch, width, rows, bf16, monkeypatch)
    unit = "wmma_f32_16x16x16" if arch == "gfx1100" else "mfma_f32_32x32x"
    assert f"\tv_{unit}" in text
    assert fact(text, "private_segment_fixed_size") == fact(text, "vgpr_spill_count") == 0


@pytest.mark.parametrize(
    ("arch", "width", "rows"),
    [
        pytest.param(*case, marks=[slow] * (case not in SOME_PARTS))
        for case in itertools.product(SERVED, WIDTHS, ROWS)
        if case[0] != "gfx1100" or case[1] <= 128
    ],
)
def test_sums_and_scores_of_fp32_queries_stay_in_registers(
    arch: str, width: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, text = compiled(arch, width, rows, fp32, monkeypatch)
    assert layout.parts == 3
    assert fact(text, "private_segment_fixed_size") == fact(text, "vgpr_spill_count") == 0


def test_matrix_units_that_flush_denormals_are_not_used() -> None:
    plan, ((*_, op),) = planned([Shape(128, 128, 2, 1, 64)], machine_for("gfx90a"), bf16)
    assert not machine_of(plan).has(Capability.ATTENTION_UNITS)
    assert attention_units.layout_of(signature(plan, op), machine_of(plan)) is None


def test_more_than_2_to_25_keys_use_the_generic_body() -> None:
    plan, ((*_, op),) = planned([Shape(128, 128, 2, 1, 64)], machine_for("gfx942"), bf16)
    sig = signature(plan, op)
    for keys, there in ((1 << 25, True), ((1 << 25) + 1, False)):
        longer = [dataclasses.replace(o, shape=(1, keys, 64)) for o in sig.operands[1:3]]
        operands = (sig.operands[0], *longer, *sig.operands[3:])
        far = dataclasses.replace(sig, operands=operands)
        assert (attention_units.layout_of(far, machine_of(plan)) is not None) == there


def test_unaligned_rows_use_the_generic_body() -> None:
    """Attention of unaligned rows uses the generic body. The alignment of external memory is
    checked at run time, the alignment of a plan's own rows when the plan is compiled.
    """
    machine = machine_for("gfx942")
    plan, _ = planned([Shape(128, 128, 2, 1, 64)], machine, bf16)
    outside = dataclasses.replace(
        plan, buffers=tuple(dataclasses.replace(b, arena="external") for b in plan.buffers)
    )
    text = write(outside, machine, backend.dialect("gfx942")).source.text
    assert "_anywhere(c, t);" in text and "  ark_attention_units<" in text
    plan, _ = planned([Shape(128, 128, 2, 1, 20)], machine, bf16)
    text = write(plan, machine, backend.dialect("gfx942")).source.text
    assert "  ark_attention_units<" not in text
