"""Products with quantised weights of chosen experts on AMD's vector and matrix units, emulated and
compared with NumPy in double precision.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.tasks import experts as bodies

from ark.ir import dtype as types
from ark.ir.dtype import DataType, bf16, fp32, int32, row_type
from ark.ir.graph import Graph
from ark.ir.rows import row_bytes, row_values
from ark.lower import registry
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.codes import every_code
from tests.slow import in_turns

pytestmark = pytest.mark.emulated("slow")

EXPERTS, FIRST, OF = 3, 1, 5
# The products: (codes, group size, rows, slots: chosen experts per row, True if each slot has its
# own input, columns, outputs, type of the input, name of the body's variant)
CASES: list[tuple[DataType, int, int, int, bool, int, int, DataType, str]] = [
    (types.fp4, 32, 1, 4, False, 288, 640, fp32, "split"),
    (types.fp8_e4m3, 128, 3, 2, True, 384, 70, bf16, "split"),
    (types.fp4, 32, 1, 2, True, 2880, 90, fp32, "split"),  # two parts of a row, one not whole
    (types.uint4, 64, 1, 2, False, 320, 40, fp32, "split"),
    (types.fp4, 32, 1, 2, False, 4256, 40, fp32, "several"),  # three parts
    (types.int8, 72, 2, 2, False, 72, 40, bf16, "several"),  # a scale for 72 columns
]
ARCHS = ("gfx950", "gfx942", "gfx90a")


@pytest.mark.parametrize(
    ("arch", "codes", "group", "rows", "slots", "each", "k", "n", "given", "form"),
    in_turns(ARCHS, CASES),
    indirect=["arch"],
)
def test_chosen_experts(
    arch: str,
    codes: DataType,
    group: int,
    rows: int,
    slots: int,
    each: bool,
    k: int,
    n: int,
    given: DataType,
    form: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products with the quantised weights of chosen experts. The results of experts of other ranks
    are zeros. MAX_SHARED_SUMS and MAX_LOADS_IN_FLIGHT are lowered, so that a task multiplies few
    rows at a time.
    """
    monkeypatch.setattr(bodies, "MAX_SHARED_SUMS", 32)
    monkeypatch.setattr(bodies, "MAX_LOADS_IN_FLIGHT", 6)
    rng = np.random.default_rng(k + n)
    dtype = row_type(codes, k, group, bf16, codes == types.uint4, bf16)
    steps = rng.uniform(0.25, 4, (EXPERTS * n, dtype.groups))
    zeros = np.full_like(steps, 7) if dtype.zeros else None
    stored = row_bytes(dtype, every_code(dtype, EXPERTS * n, rng), steps, zeros)
    x = rng.standard_normal((rows, slots, k) if each else (rows, k)).astype(given.to_numpy())
    chosen = rng.permuted(np.tile(np.arange(OF, dtype=np.int32), (rows, 1)), axis=1)[:, :slots]
    graph = Graph()
    tensors = [
        graph.tensor(x.shape, given, arena="state", name="x"),
        graph.tensor((EXPERTS, n, k), dtype, arena="parameter", name="w"),
        graph.tensor(chosen.shape, int32, arena="state", name="chosen"),
    ]
    out = graph.tensor((rows, slots, n), fp32, arena="state", name="y")
    graph.add("expert_linear", tensors, [out], {"first": FIRST, "of": OF}, "product")
    device = backend.open(0)
    try:
        planned = plan(graph, device.machine)
        verify([planned])
        sig = kinds.signature(planned, planned.ops[0])
        body = backend.dialect(device.machine.arch).body(sig, device.machine)
        assert isinstance(body, bodies.Experts)
        if (arch, codes) == ("gfx950", types.fp4):
            form = "scaled"
        assert f"ark_expert_{form}<" in body.source("product", sig, device.machine), arch
        with Executor(planned, backend, device) as executor:
            executor.write("x", x)
            executor.write("w", stored.reshape(EXPERTS, n, -1))
            executor.write("chosen", np.ascontiguousarray(chosen))
            executor.start(2).wait()
            got = executor.read("y").reshape(rows, slots, n)
    finally:
        device.close()
    weights = row_values(dtype, stored).astype(np.float64).reshape(EXPERTS, n, k)
    wide = np.broadcast_to(x.astype(np.float64).reshape(rows, -1, k), (rows, slots, k))
    for place in np.ndindex(rows, slots):
        expert = chosen[place] - FIRST
        if not 0 <= expert < EXPERTS:
            np.testing.assert_array_equal(got[place], 0)
            continue
        most = np.abs(weights[expert]) @ np.abs(wide[place])
        assert (np.abs(got[place] - weights[expert] @ wide[place]) / most).max() < 1e-6


# The products: (rows; slots: chosen experts per row; True if each slot has its own input; columns
# and outputs of an expert; matrices of weights per expert; True if the results of a row are added
# up)
EPILOGUES = [(1, 4, False, 288, 640, 2, False), (2, 3, True, 288, 70, 1, True)]
EPILOGUES += [(1, 6, True, 2880, 40, 1, True)]  # more slots than runs in flight


@pytest.mark.parametrize(
    ("arch", "rows", "slots", "each", "k", "n", "weights", "total"),
    in_turns(("gfx950", "gfx942"), EPILOGUES),
    indirect=["arch"],
)
def test_epilogue_of_chosen_experts(
    arch: str,
    rows: int,
    slots: int,
    each: bool,
    k: int,
    n: int,
    weights: int,
    total: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Products with chosen experts whose epilogue has a bias for each expert and a gate of two
    products, or adds up the results of a row's experts, multiplied by scores, and a residual.
    """
    monkeypatch.setattr(bodies, "MAX_SHARED_SUMS", 64 * weights * (slots if total else 1))
    monkeypatch.setattr(bodies, "MAX_LOADS_IN_FLIGHT", 6)
    rng = np.random.default_rng(k + n + rows)
    dtype = row_type(types.fp4, k, 32, bf16, False, bf16)
    names = ["w", "v"][:weights]
    stored = {
        name: row_bytes(
            dtype, every_code(dtype, OF * n, rng), rng.uniform(0.25, 4, (OF * n, dtype.groups))
        )
        for name in names
    }
    floats = {"x": rng.standard_normal((rows, slots, k) if each else (rows, k))}
    floats |= {f"bias of {name}": rng.standard_normal((OF, n)) for name in names}
    added = ["add", ["input", 0], ["input", weights]]
    tree = ["mul", added, ["add", ["input", 1], ["input", 3]]]
    if total:
        floats |= {"scores": rng.standard_normal((rows, slots, 1))}
        floats |= {"residual": rng.standard_normal((rows, n))}
        tree = ["mul", added, ["input", 2]]
    given = {name: array.astype(np.float32) for name, array in floats.items()}
    chosen = np.stack([rng.choice(OF, slots, slots > OF) for _ in range(rows)]).astype(np.int32)
    graph = Graph()
    t = {name: graph.tensor(a.shape, fp32, arena="state", name=name) for name, a in given.items()}
    for name in names:
        t[name] = graph.tensor((OF, n, k), dtype, arena="parameter", name=name)
    t["chosen"] = graph.tensor(chosen.shape, int32, arena="state", name="chosen")
    shape = (rows, n) if total else (rows, slots, n)
    out = graph.tensor(shape, fp32, arena="state", name="y")
    attrs = {"weights": weights, "tables": weights, "scores": int(total), "expr": tree}
    attrs |= {"total": total, "residual": total}
    order = ["x", "w", "chosen", *names[1:], *(f"bias of {name}" for name in names)]
    order += ["scores", "residual"] if total else []
    graph.add("expert_linear", [t[name] for name in order], [out], attrs, "product")
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        sig = kinds.signature(planned, planned.ops[0])
        body = backend.dialect(device.machine.arch).body(sig, device.machine)
        assert isinstance(body, bodies.Experts)
        with Executor(planned, backend, device) as executor:
            for name, array in {**given, "chosen": chosen}.items():
                executor.write(name, array)
            for name, array in stored.items():
                executor.write(name, array.reshape(OF, n, -1))
            executor.start(2).wait()
            got = executor.read("y").reshape(shape)
    wide = {name: array.astype(np.float64) for name, array in given.items()} | {"chosen": chosen}
    for name, array in stored.items():
        wide[name] = row_values(dtype, array).astype(np.float64).reshape(OF, n, k)
    reference = registry.get("expert_linear").reference
    assert reference is not None
    (want,) = reference([wide[name] for name in order], attrs)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("arch", ("gfx950", "gfx942"), indirect=True)
def test_inputs_of_experts_travel_as_packets(arch: str) -> None:
    """Two products with chosen experts: the second one's input is packets. Scales are powers of
    two, and two rows of the input have an infinity and NaN.
    """
    rows, slots, k, n = 3, 4, 2880, 512
    rng = np.random.default_rng(7)
    graph = Graph()
    tensors, given = {}, {}
    for name, (inner, outer) in {"up": (k, n), "down": (n, 96)}.items():
        dtype = row_type(types.fp4, inner, 32, bf16, False, bf16)
        steps = np.exp2(rng.integers(-3, 3, (OF * outer, dtype.groups)))
        stored = row_bytes(dtype, every_code(dtype, OF * outer, rng), steps)
        tensors[name] = graph.tensor((OF, outer, inner), dtype, arena="parameter", name=name)
        given[name] = stored.reshape(OF, outer, -1)
    x = (rng.standard_normal((rows, k)) * np.exp2(rng.integers(-12, 12, (rows, k)))).astype(
        np.float32
    )
    x[1, 5], x[2, 2879] = np.inf, np.nan
    chosen = np.stack([rng.choice(OF, slots, False) for _ in range(rows)]).astype(np.int32)
    given |= {"x": x, "chosen": chosen}
    for name, dtype in (("x", fp32), ("chosen", int32)):
        tensors[name] = graph.tensor(given[name].shape, dtype, arena="state", name=name)
    middle = graph.tensor((rows, slots, n), fp32, name="middle")
    out = graph.tensor((rows, slots, 96), fp32, arena="state", name="y")
    graph.add("expert_linear", [tensors[i] for i in ("x", "up", "chosen")], [middle], {}, "up")
    graph.add("expert_linear", [middle, tensors["down"], tensors["chosen"]], [out], {}, "down")
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        assert kinds.signature(planned, planned.ops[1]).operands[0].packet
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = executor.read("y").reshape(rows, slots, 96)
    up, down = (
        row_values(tensors[name].dtype, given[name].reshape(OF * outer, -1))
        .astype(np.float64)
        .reshape(OF, outer, -1)
        for name, outer in (("up", n), ("down", 96))
    )
    with np.errstate(invalid="ignore"):
        want = np.stack(
            [[down[e] @ (up[e] @ x[r].astype(float)) for e in chosen[r]] for r in range(rows)]
        )
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5 * np.abs(want[0]).max())
