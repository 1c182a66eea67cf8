"""Matrix products of the kernel variant `matrix`, in which warpgroups multiply operands that
another warp loads: when they are chosen, that they compile without waits between instructions, and
that on a GPU they equal NumPy's for all transposes, batches and ragged edges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re

import numpy as np
import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import DataType, bf16, fp8_e4m3, fp16, fp32, int8, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.lower.tiling import side_by_side
from ark.machine import Machine
from ark.machine.variant import COMPUTE, LOAD, Role
from ark.plan.serialize import from_json, machine_of, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.tasks.expression import leaf, number
from tests import kept
from tests.codegen.machine_code import section
from tests.slow import few, slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

from tests.cases.cuda_matrix import CASES, FEW_BITS, few_bits, product

GPU = bool(backend.probe().devices)
needs_gpu = pytest.mark.skipif(
    not GPU and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"),
    reason=f"no NVIDIA GPU: {backend.probe().reason}",
)
H100 = machines.MODELS["h100"]

ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}


# `nox` compiles each combination of transposes once, a batch of products, and a product of few
# rows.
@pytest.mark.parametrize(
    ("left", "right", "m", "n", "k", "transposes", "dtype"),
    [
        pytest.param(*case, marks=[slow] * (i not in (0, 6, 8, 10, 12, 15, 18)))
        for i, case in enumerate(CASES)
    ],
)
def test_compiler_does_not_wait_between_instructions(
    left, right, m, n, k, transposes, dtype
) -> None:
    planned = product(H100, left, right, m, n, k, transposes, dtype, "matrix")
    assert planned.variant == "matrix"
    machine = machine_of(planned)
    emitted = write(planned, machine, backend.dialect("sm_90a"))
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "wgmma.mma_async" in emitted.source.text
    assert "serialized" not in binary.log
    place = next(i for i, op in enumerate(planned.ops) if op.kind == "matmul")
    assert len(emitted.maps[emitted.opcode[place]]) == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [(8, 4096, 4096, bf16), (512, 512, 512, fp32), (512, 40, 2048, bf16)],
)
def test_operands_without_box_maps_use_the_block_variant(m, n, k, dtype) -> None:
    assert product(H100, (), (), m, n, k, (False, False), dtype).variant == "block"


@pytest.mark.parametrize(("depth", "k", "variant"), [(1024, 2048, "matrix"), (64, 8192, "block")])
def test_small_product_among_large_ones_runs_beside_them(depth, k, variant) -> None:
    """A product of few rows after an encoder (a pooler of eight rows) runs in the variant `matrix`,
    unless it is most of the work.
    """
    graph = Graph()
    small = graph.tensor((8, 1024), bf16, arena="state", name="made")
    rows = graph.tensor((8, k), bf16, arena="state", name="rows")
    table = graph.tensor((1024, k), bf16, arena="state", name="table")
    graph.add(
        "matmul", [rows, table], [small], {"transpose_a": False, "transpose_b": True}, "small"
    )
    shapes = {"a": (1024, depth), "b": (1024, depth), "c": (1024, 1024)}
    a, b, c = (graph.tensor(s, bf16, arena="state", name=n) for n, s in shapes.items())
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "large")
    planned = plan(graph, H100)
    verify([planned])
    assert planned.variant == variant


def test_registers_of_roles_are_those_that_the_plan_names() -> None:
    """The warps of each role have as many registers as the plan's variant states; together they fit
    on a processor.
    """
    planned = product(H100, *CASES[0])
    entry = to_json(planned)
    (variant,) = machine_of(planned).variants
    assert sum(32 * r.warps * r.registers for r in variant.roles) <= 65536
    codes: set[bytes] = set()
    for compute, load in ((232, 40), (216, 40), (232, 32)):
        roles = (Role(COMPUTE, 8, compute), Role(LOAD, 4, load))
        assert roles == variant.roles or codes
        changed = json.loads(entry)
        changed["machine"]["variants"][0]["roles"] = [dataclasses.asdict(r) for r in roles]
        plan = from_json(json.dumps(changed))
        target = machine_of(plan)
        source = write(plan, target, backend.dialect(H100.arch)).source
        codes.add(kept.binary(backend, source, Target(H100.arch, target.threads)).data)
    assert len(codes) == 3


def test_processors_compute_neighbouring_tiles_at_the_same_time() -> None:
    coords = [(0, 0, i, 0) for i in range(29)]
    dealt = side_by_side(coords, 4)
    assert sorted(dealt) == coords
    shares = [dealt[29 * p // 4 : 29 * (p + 1) // 4] for p in range(4)]
    assert [share[0] for share in shares] == coords[:4]
    assert [share[6] for share in shares] == coords[24:28]


@needs_gpu
@pytest.mark.parametrize(("left", "right", "m", "n", "k", "transposes", "dtype"), CASES)
def test_products_equal_numpy(left, right, m, n, k, transposes, dtype) -> None:
    device = backend.open(0)
    rng = np.random.default_rng(3)
    with contextlib.closing(device):
        planned = product(device.machine, left, right, m, n, k, transposes, dtype, "matrix")
        with Executor(planned, backend, device) as executor:
            arrays = {}
            for tensor in ("a", "b"):
                shape = executor.read(tensor).shape
                arrays[tensor] = rng.standard_normal(shape).astype(dtype.numpy)
                executor.write(tensor, arrays[tensor])
            runs = []
            for iterations in (1, 3):
                executor.start(iterations).wait(60)
                runs.append((executor.read("c").copy(), executor.read("e").copy()))
    x, y = (arrays[t].astype(np.float64) for t in ("a", "b"))
    x = x.swapaxes(-1, -2) if transposes[0] else x
    y = y.swapaxes(-1, -2) if transposes[1] else y
    exact, scale = x @ y, np.sqrt(x**2 @ y**2)
    bound = ROUNDING[dtype.name] * np.abs(exact) + 2.0**-22 * np.sqrt(k) * scale
    for c, e in runs:
        assert (np.abs(c.astype(np.float64).reshape(exact.shape) - exact) <= bound).all()
        np.testing.assert_array_equal(
            e.astype(np.float32).ravel(), np.maximum(c.astype(np.float32), 0).ravel()
        )
    assert runs[0][0].tobytes() == runs[1][0].tobytes()


def fused(machine: Machine, m: int, n: int, k: int, dtype: DataType, result: DataType) -> Plan:
    """A plan of c = relu(a b^T + bias) * column + rest, where c has type `result`. If m is odd, the
    rows of `rest` are not multiples of 16 bytes.
    """
    graph = Graph()
    shapes = {"a": (m, k), "b": (n, k), "bias": (n,), "column": (m, 1)}
    a, b, bias, column = (
        graph.tensor(s, dtype, arena="state", name=name) for name, s in shapes.items()
    )
    extents = (m, n + 3 * (m % 2))
    rest = graph.tensor((m, n), dtype, arena="state", name="rest", extents=extents)
    steps = [graph.tensor((m, n), dtype) for _ in range(4)]
    output = graph.tensor((m, n), result, arena="state", name="c")
    c = output if result == dtype else graph.tensor((m, n), dtype)
    graph.add("matmul", [a, b], [steps[0]], {"transpose_a": False, "transpose_b": True}, "product")
    graph.add("add", [steps[0], bias], [steps[1]], {}, "bias")
    graph.add("relu", [steps[1]], [steps[2]], {}, "relu")
    graph.add("mul", [steps[2], column], [steps[3]], {}, "column")
    graph.add("add", [steps[3], rest], [c], {}, "rest")
    if c is not output:
        graph.add("cast", [c], [output], {}, "cast")
    task_plan = plan(graph, machine)
    verify([task_plan])
    return task_plan


FUSED = [
    (512, 1096, 520, bf16, fp32),
    (999, 1096, 520, fp16, fp32),
    (33, 1096, 4096, bf16, fp32),
    (16, 4096, 4096, bf16, fp32),
    (1000, 1096, 520, fp16, fp16),
    (2048, 2304, 768, bf16, bf16),
]


@pytest.mark.parametrize(("m", "n", "k", "dtype", "result"), few(3, FUSED))
def test_epilogues_are_compiled_into_the_product(m, n, k, dtype, result) -> None:
    planned = fused(H100, m, n, k, dtype, result)
    assert planned.variant == "matrix"
    parts = planned.ops[0].params.get("splits", 1) > 1
    assert [op.kind for op in planned.ops] == ["matmul", *(["elementwise"] if parts else [])]
    machine = machine_of(planned)
    emitted = write(planned, machine, backend.dialect("sm_90a"))
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    ahead = "ark_matrix_each<" if m % 2 else "ark_matrix_each_residual<"  # rows of whole packs
    if result == dtype:
        ahead = "ark_matrix_pairs<"
    called = "ark_matrix_store_whole<" if parts else ahead
    assert called in emitted.source.text.split("task_0_matmul(ArkCtx")[1]
    assert "serialized" not in binary.log
    assert not re.search(r"[1-9]\d* bytes spill", binary.log)


def test_epilogue_with_written_gelu_is_short_and_unrolled() -> None:
    """The code of a product with gelu as its epilogue is short and unrolled. gelu is written in
    elementary ops, as in transformers' GPT-2, and the columns of the weights are contiguous.
    """
    graph = Graph()
    shapes = {"a": (2048, 768), "b": (768, 3072), "bias": (3072,)}
    a, b, bias = (graph.tensor(s, bf16, arena="state", name=n) for n, s in shapes.items())
    c = graph.tensor((2048, 3072), bf16, arena="state", name="c")
    product, x = (graph.tensor(c.shape, bf16) for _ in range(2))
    graph.add("matmul", [a, b], [product], {"transpose_a": False, "transpose_b": False})
    graph.add("add", [product, bias], [x], {})
    tree = ["add", leaf(0), ["mul", ["mul", ["mul", leaf(0), leaf(0)], leaf(0)], number(0.044715)]]
    tanh = ["tanh", ["mul", tree, number(math.sqrt(2 / math.pi))]]
    written = ["mul", ["mul", leaf(0), number(0.5)], ["add", tanh, number(1.0)]]
    graph.add("elementwise", [x], [c], {"expr": written})
    planned = plan(graph, H100)
    assert [op.params["tile"] for op in planned.ops] == [[128, 192]]
    machine = machine_of(planned)
    emitted = write(planned, machine, backend.dialect("sm_90a"))
    body = emitted.source.text.split("task_0_matmul(ArkCtx")[1]
    assert "ark_matrix_pairs<192, 64, false, 4>" in body
    assert "ark_gelu(" in body and "ark_tanh(" not in body
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "serialized" not in binary.log
    assert not re.search(r"[1-9]\d* bytes spill", binary.log)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=lambda d: d.name)
def test_gate_in_an_epilogue_is_short_for_16_bits(dtype: DataType) -> None:
    graph = Graph()
    a, b = (graph.tensor((1024, 1024), bf16, arena="state", name=n) for n in "ab")
    gate, out = (graph.tensor((1024, 1024), dtype, arena="state") for _ in range(2))
    product = graph.tensor(out.shape, dtype)
    graph.add("matmul", [a, b], [product], {"transpose_a": False, "transpose_b": True})
    graph.add("elementwise", [gate, product], [out], {"expr": ["swiglu", leaf(0), leaf(1)]})
    planned = plan(graph, H100)
    emitted = write(planned, machine_of(planned), backend.dialect("sm_90a"))
    body = emitted.source.text.split("task_0_matmul(ArkCtx")[1]
    assert "ark_matrix_pairs<" in body
    assert ("ark_silu(" in body) == (dtype is bf16)


@needs_gpu
@pytest.mark.parametrize(("m", "n", "k", "dtype", "result"), FUSED)
def test_products_with_epilogues_equal_numpy(m, n, k, dtype, result) -> None:
    device = backend.open(0)
    rng = np.random.default_rng(4)
    with contextlib.closing(device):
        planned = fused(device.machine, m, n, k, dtype, result)
        with Executor(planned, backend, device) as executor:
            arrays = {}
            for tensor in ("a", "b", "bias", "column", "rest"):
                shape = executor.read(tensor).shape
                arrays[tensor] = rng.standard_normal(shape).astype(dtype.numpy)
                lies = executor.find(tensor)
                rows = np.zeros(lies.extents, dtype.numpy)
                rows[..., : shape[-1]] = arrays[tensor]
                executor.device.write(executor.tensor_address(lies), rows)
            executor.start(2).wait(60)
            c = executor.read("c").copy()
    a, b, bias, column, rest = (v.astype(np.float64) for v in arrays.values())
    exact = np.maximum(a @ b.T + bias, 0) * column + rest
    scale = np.sqrt(a**2 @ (b**2).T) * np.abs(column)
    rounding = {fp32: 2.0**-21, fp16: 2.0**-10, bf16: 2.0**-7}[result]
    assert (np.abs(c - exact) <= 2.0**-22 * np.sqrt(k) * scale + rounding * np.abs(exact)).all()


# `nox` compiles one case of each of both types of 8-bit floats, integers, and tf32.
@pytest.mark.parametrize(
    ("m", "n", "k", "types", "scaled", "instruction"),
    [pytest.param(*case, marks=[slow] * (i % 2 == 0)) for i, case in enumerate(FEW_BITS)],
)
def test_types_of_few_bits_are_multiplied_by_warpgroups(
    m, n, k, types, scaled, instruction
) -> None:
    planned = few_bits(H100, m, n, k, types, scaled)
    assert planned.variant == "matrix"
    parts = planned.ops[0].params.get("splits", 1) > 1
    assert [op.kind for op in planned.ops] == ["matmul", *(["elementwise"] if parts else [])]
    machine = machine_of(planned)
    emitted = write(planned, machine, backend.dialect("sm_90a"))
    assert f'{instruction}"' in emitted.source.text
    binary = kept.binary(backend, emitted.source, Target("sm_90a", machine.threads))
    assert "serialized" not in binary.log


@pytest.mark.parametrize("dtype", [fp8_e4m3, int8, fp32], ids=str)
@pytest.mark.parametrize("across", [(True, False), (False, True), (True, True)])
def test_transposed_operands_of_small_types_are_copied(dtype, across) -> None:
    """Operands of 8 bits, or of fp32 as tf32, that are not contiguous along k are copied to rows
    that are, at multiples of 16 bytes. Matrix units then multiply the copies.
    """

    def plan_of(k: int) -> Plan:
        graph = Graph()
        a = graph.tensor((k, 512) if across[0] else (512, k), dtype, arena="state", name="a")
        b = graph.tensor((k, 1024) if across[1] else (1024, k), dtype, arena="state", name="b")
        out = int32 if dtype == int8 else fp32
        c = graph.tensor((512, 1024), out, arena="state", name="c")
        attrs = {"transpose_a": across[0], "transpose_b": not across[1]}
        graph.add("matmul", [a, b], [c], attrs | ({"tf32": True} if dtype == fp32 else {}))
        task_plan = plan(graph, H100)
        verify([task_plan])
        return task_plan

    turned = plan_of(1024)
    assert [op.kind for op in turned.ops] == ["transpose"] * sum(across) + ["matmul"]
    text = write(turned, machine_of(turned), backend.dialect("sm_90a")).source.text
    assert "  ark_matrix_product<ArkProduct" in text
    laid = plan_of(1030 if dtype == fp32 else 1032)
    assert [op.kind for op in laid.ops] == [
        *("transpose" if side else "elementwise" for side in across),
        "matmul",
    ]
    for op in laid.ops[:2]:
        assert laid.tensors[op.operands[-1]].strides[0] * dtype.itemsize % 16 == 0


@needs_gpu
@pytest.mark.parametrize(("m", "n", "k", "types", "scaled", "instruction"), FEW_BITS)
def test_products_of_few_bits_equal_numpy(m, n, k, types, scaled, instruction) -> None:
    rng = np.random.default_rng(6)
    with contextlib.closing(backend.open(0)) as device:
        planned = few_bits(device.machine, m, n, k, types, scaled)
        with Executor(planned, backend, device) as executor:
            arrays = {}
            for tensor, dtype in zip("ab", types, strict=True):
                shape = executor.read(tensor).shape
                size = rng.standard_normal(shape) * (40 if dtype == int8 else 1)
                arrays[tensor] = size.clip(-127, 127).astype(dtype.numpy)
                executor.write(tensor, arrays[tensor])
            runs = []
            for iterations in (1, 3):
                executor.start(iterations).wait(60)
                runs.append(executor.read("c").astype(np.float64))
    a, b = (v.astype(np.float64) for v in arrays.values())
    exact = a @ b.T * (0.5 if scaled else 1.0)
    # tf32 truncates each factor to 10 bits. For 8-bit floats, units truncate sums after about 13
    # bits, 32 products at a time, and these errors add up.
    cut = {"int8": 0.0, "fp32": 2.0**-9}.get(types[0].name, k / 32 * 2.0**-13)
    bound = cut * (np.sqrt(a**2 @ (b**2).T) * 4 + np.abs(exact)) + 1e-5 * (types[0] != int8)
    for c in runs:
        assert (np.abs(c - exact) <= bound).all(), np.abs(c - exact).max()
    assert runs[0].tobytes() == runs[1].tobytes()


@pytest.mark.parametrize(("rows", "leaves"), [(512, True), (4096, False)])
def test_weights_that_are_read_once_leave_the_cache_first(rows, leaves) -> None:
    """The loads of weights that are read once have the eviction priority by which they leave L2
    first. Weights that several tiles of a processor read one after another stay in L2.
    """
    planned = product(H100, (), (), rows, 2048, 4096, (False, True), bf16)
    machine = machine_of(planned)
    source = write(planned, machine, backend.dialect("sm_90a")).source
    binary = kept.binary(backend, source, Target("sm_90a", machine.threads))
    words = np.frombuffer(section(binary.data, ".text.ark_loop"), np.uint32)
    assert (0x12F00000 in words) == leaves


@pytest.mark.parametrize(
    ("m", "n", "k", "overlap"),
    [(512, 4096, 4096, "false"), (512, 512, 512, "true"), (4096, 4096, 4096, "true")],
)
def test_stages_overlap_if_operands_fit_into_l2(m, n, k, overlap) -> None:
    """The products of a stage overlap with the wait for the next stage only if operands come from
    the cache, not for 512 rows with weights from memory.
    """
    planned = product(H100, (), (), m, n, k, (False, True), bf16)
    source = write(planned, machine_of(planned), backend.dialect("sm_90a")).source.text
    matches = set(
        re.findall(r"ArkProduct<ArkDeal<[^>]*>(?:, [^,>]*){7}, (true|false), \d+>", source)
    )
    assert matches == {overlap}
