"""CUDA's attention of many rows on matrix units: masks, paged caches and views of one projection,
in thread blocks that the host simulates (tests/block_on_host.py), compiled, and on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ark
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp16
from ark.lower.pipeline import plan as make_plan
from ark.plan.kind import signature
from ark.plan.serialize import machine_of
from ark.plan.types import Plan, PlanOp
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests import kept
from tests.attended import PAGES, WIDE, expected, given, planned
from tests.block_on_host import Block
from tests.cases.attend import COLUMNS, FORMS, attention
from tests.cases.attention import SHAPES, TILES, Shape
from tests.opcheck import Case, compare
from tests.slow import slow

pytest.importorskip("ark_cuda")

from ark_cuda import backend, machines
from ark_cuda.tasks import attention_units

needs_gpu = pytest.mark.skipif(
    not backend.probe().devices and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]


def layout_of(plan: Plan, op: PlanOp) -> attention_units.Layout:
    layout = attention_units.layout_of(signature(plan, op), machine_of(plan))
    assert layout is not None
    return layout


def fill(block: Block, case: Case, named: Sequence[str]) -> None:
    for name, array in given(case, named).items():
        block.named(name)[...] = array


@pytest.mark.parametrize(
    ("machine", "shapes", "dtype", "late", "downwards"),
    [
        ("h100", (*SHAPES[:6:2], SHAPES[-1]), bf16, True, False),
        ("h100", WIDE, fp16, False, True),
        ("rtx5090", (*WIDE[1:4], *PAGES[1:4:2]), bf16, True, True),  # with less shared memory
        pytest.param("h100", PAGES, fp16, True, False, marks=slow),
        pytest.param("h100", SHAPES, bf16, False, False, marks=slow),
        pytest.param("a100", WIDE, bf16, False, False, marks=slow),
        pytest.param("h100", TILES, bf16, True, False, marks=slow),
        pytest.param("h100", SHAPES, fp16, False, True, marks=slow),
    ],
)
def test_blocks_on_the_host_give_torchs_results(
    machine: str,
    shapes: Sequence[Any],
    dtype: DataType,
    late: bool,
    downwards: bool,
    tmp_path: Path,
) -> None:
    few = machines.MODELS[machine].with_processors(2)
    plan, cases = planned(shapes, few, dtype)
    block = Block(plan, tmp_path)
    for case, named, op in cases:
        layout_of(plan, op)
        fill(block, case, named)
        block.run(op, late, downwards)
        compare(case.name, block.operand(op, 3), expected(case), dtype, case.tolerance)


@pytest.mark.parametrize(("late", "downwards"), [(False, True), (True, False)])
def test_crews_share_the_tiles_of_a_task(late: bool, downwards: bool, tmp_path: Path) -> None:
    """Tiles of few keys are computed several at once, each by a crew (some warps of the block). The
    crews may get unequal numbers of tiles, and one warp or several compute a slab (16 query rows).
    Copies for the next tile arrive early or late.
    """
    shapes = (
        Shape(49, 49, 3, 3, 32, batch=4, causal=False, mask=(2, 3, 49, 49), added=True),
        Shape(33, 49, 3, 3, 64, batch=3, causal=False, mask=(3, 1, 33, 49)),
        Shape(20, 45, 3, 3, 24, batch=2, causal=False, mask=(1, 3, 20, 45), added=True),
        Shape(9, 40, 10, 2, 16, position=13),
    )
    plan, cases = planned(shapes, H100.with_processors(2), bf16)
    block = Block(plan, tmp_path)
    layouts = []
    for case, named, op in cases:
        layouts.append(layout_of(plan, op))
        fill(block, case, named)
        block.run(op, late, downwards)
        compare(case.name, block.operand(op, 3), expected(case), bf16, case.tolerance)
    assert min(layout.crews for layout in layouts) > 1
    assert {layout.team > 1 for layout in layouts} == {False, True}


def test_tiles_of_many_keys_are_computed_one_by_one() -> None:
    shape = Shape(64, 256, 16, 8, 64, batch=40, causal=False)
    plan, ((*_, op),) = planned([shape], H100, bf16)
    assert layout_of(plan, op).crews == 1


def test_masked_rows_of_the_cache_are_not_multiplied(tmp_path: Path) -> None:
    """Rows of the cache beyond the position, which may have any contents, do not affect
    the result.
    """
    shape = Shape(40, 300, 2, 1, 64, position=77)
    plan, ((case, named, op),) = planned([shape], H100, bf16)
    block = Block(plan, tmp_path)
    fill(block, case, named)
    for index in (1, 2):
        block.operand(op, index)[:, 77 + 40 :] = np.nan
    block.run(op)
    compare(case.name, block.operand(op, 3), expected(case), bf16, case.tolerance)


def test_rows_of_all_heads_are_read_where_they_lie(tmp_path: Path) -> None:
    """Attention that is written as product, softmax and product. Its queries, keys and values are
    parts of the output of one projection and are read there without a copy.
    """
    machine = machines.MODELS["a100"].with_processors(4)
    model = ark.Model(0, 1)
    with ark.use_model(model):
        attention(FORMS["columns, causal"], ark.tensor(COLUMNS, bf16))
    plan = make_plan(model.graph, machine)
    verify([plan])
    (op,) = (op for op in plan.ops if op.kind == "attention_tiles")
    assert op.params["by_rows"] and plan.variant == "block"
    layout_of(plan, op)
    block = Block(plan, tmp_path)
    rng = np.random.default_rng(3)
    parts = []
    for index in range(3):  # (batch, rows, heads * width)
        operand = block.operand(op, index)
        operand[...] = rng.standard_normal(operand.shape).astype(operand.dtype)
        wide = torch.tensor(operand.astype(np.float64))
        parts.append(wide.reshape(*wide.shape[:2], op.params["heads"], -1).transpose(1, 2))
    block.run(op, downwards=True)
    want = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)
    got = block.operand(op, 3)
    compare("by rows", got, want.reshape(got.shape).numpy(), bf16)


def spilled(plan: Plan) -> list[int]:
    """The bytes that each body spills."""
    machine = machine_of(plan)
    emitted = write(plan, machine, backend.dialect(machine.arch))
    assert "  ark_attention_units<" in emitted.source.text
    target = Target(machine.arch, machine.threads)
    log = kept.binary(backend, emitted.source, target).log.splitlines()
    lines = [b for a, b in itertools.pairwise(log) if "_attention_tiles" in a and " spill " in b]
    return [int(line.split(" bytes spill stores")[0].rpartition(" ")[2]) for line in lines]


ARCHS = ("a100", "h100", "b200", "rtx5090")
WIDTHS = range(16, 257, 16)


@pytest.mark.parametrize(
    ("machine", "width"),
    [
        pytest.param(m, w, marks=[slow] * ((m, w) not in (("a100", 128), ("rtx5090", 256))))
        for m in ARCHS
        for w in WIDTHS
    ],
)
def test_sums_and_scores_stay_in_registers(machine: str, width: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    shape = Shape(4096, 4096, 16, 8, width, position=0, window=1000, softcap=20.0, sinks=True)
    plan, ((*_, op),) = planned([shape], machines.MODELS[machine], bf16)
    assert op.params["rows"] == 128
    assert spilled(plan) == [0]


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=[slow] * (w != 128)) for w in (64, 128, 256)]
)
def test_matrix_variant_without_wgmma_uses_this_body(width: int) -> None:
    """Attention with a head width that wgmma does not support also compiles to mma.sync in the
    variant `matrix`, whose warps have more registers.
    """
    pytest.importorskip("cuda.bindings.nvrtc")
    shape = Shape(4096, 4096, 16, 8, width, softcap=20.0)
    plan, ((*_, op),) = planned([shape], machines.MODELS["b200"], fp16, "matrix")
    assert layout_of(plan, op).warps == 8
    assert spilled(plan) == [0]


@pytest.mark.parametrize("variant", ["matrix", "block"])
def test_attention_in_windows_stays_in_registers(variant: str) -> None:
    """Several crews with an added mask, as in Swin: queries, masks and sums are in registers."""
    pytest.importorskip("cuda.bindings.nvrtc")
    shape = Shape(49, 49, 3, 3, 32, batch=512, causal=False, mask=(64, 3, 49, 49), added=True)
    plan, ((*_, op),) = planned([shape], H100, bf16, variant)
    assert layout_of(plan, op).crews > 1
    assert spilled(plan) == [0]


def test_tiles_have_as_many_rows_as_keep_all_processors_busy() -> None:
    heights = {}
    for rows in (40, 512, 1024, 4096):
        plan, ((*_, op),) = planned([Shape(rows, 4096, 16, 8, 128, position=0)], H100, bf16)
        heights[rows] = op.params["rows"]
        layout = layout_of(plan, op)
        assert layout.warps == 16 and layout.nbytes <= H100.shared_bytes
    assert heights == {40: 32, 512: 32, 1024: 64, 4096: 128}


def test_unaligned_rows_use_the_generic_body() -> None:
    """Attention of unaligned rows uses the generic body. The alignment of external memory is
    checked at run time, the alignment of a plan's own rows when the plan is compiled.
    """
    plan, _ = planned([Shape(128, 128, 2, 1, 64)], H100, bf16)
    outside = dataclasses.replace(
        plan, buffers=tuple(dataclasses.replace(b, arena="external") for b in plan.buffers)
    )
    text = write(outside, machine_of(plan), backend.dialect(H100.arch)).source.text
    assert "_anywhere(c, t);" in text and "  ark_attention_units<" in text
    plan, _ = planned([Shape(128, 128, 2, 1, 20)], H100, bf16)
    text = write(plan, machine_of(plan), backend.dialect(H100.arch)).source.text
    assert "  ark_attention_units<" not in text


@needs_gpu
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize(
    "shapes", [SHAPES, TILES, WIDE, PAGES], ids=["few", "tiles", "wide", "pages"]
)
def test_all_masks_on_a_gpu(shapes: Sequence[Any], dtype: DataType) -> None:
    """Runs two iterations in the variant `block`: in the second one shared memory has old
    contents.
    """
    with contextlib.closing(backend.open(0)) as device:
        plan, cases = planned(shapes, device.machine, dtype)
        with Executor(plan, backend, device) as executor:
            for case, named, op in cases:
                layout_of(plan, op)
                for name, array in given(case, named).items():
                    executor.write(name, array)
            executor.start(2).wait(60)
            for i, (case, *_) in enumerate(cases):
                want = expected(case)
                got = executor.read(f"{i}.out").reshape(want.shape)
                compare(case.name, got, want, dtype, case.tolerance)
