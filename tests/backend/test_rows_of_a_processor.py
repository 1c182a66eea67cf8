"""Ops along rows where a processor has many rows, one for each warp: updates at indices, largest
elements and lookups, compared with NumPy, on one processor so that few rows suffice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.lower.ops import norms
from ark.lower.pipeline import plan
from ark.machine.capability import Capability
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.emulated import few_emulated

MATRIX_ROWS = 37
Inputs = Sequence[tuple[np.ndarray, ark.DataType]]
Built = tuple[str, Inputs, Callable[..., Tensor], np.ndarray]


def check(backend: str, cases: Sequence[Built]) -> set[str]:
    """Runs the cases as one plan, twice in a launch, and compares bits. Returns the plan's task
    kinds.
    """
    chosen, model = registry.get(backend), Model()

    def kept(name: str, shape: Sequence[int], dtype: ark.DataType) -> Tensor:
        return Tensor(model.graph.tensor(tuple(shape), dtype, arena="state", name=name), model)

    with use_model(model):
        for n, (_, inputs, build, _) in enumerate(cases):
            given = [kept(f"in{n}.{i}", a.shape, d) for i, (a, d) in enumerate(inputs)]
            result = build(*given)
            ark.copy(result, kept(f"out{n}", result.ir.shape, result.ir.dtype))
    with contextlib.closing(chosen.open(0)) as device:
        planned = plan(model.graph, device.machine.with_processors(1), {"fuse": False})
        verify([planned])
        with Executor(planned, chosen, device) as executor:
            for n, (_, inputs, _, _) in enumerate(cases):
                for i, (array, dtype) in enumerate(inputs):
                    executor.write(f"in{n}.{i}", array.astype(dtype.numpy))
            executor.start(2).wait()
            for n, (name, _, _, want) in enumerate(cases):
                results = executor.read(f"out{n}").reshape(want.shape).astype(np.float64)
                np.testing.assert_array_equal(results, want.astype(np.float64), name)
    return {f"{op.name} {op.kind}" for op in planned.ops}


def scattered(a: np.ndarray, ids: np.ndarray, new: np.ndarray, reduction: str) -> np.ndarray:
    """Returns the array after the updates, applied one by one in order."""
    updated = a.copy()
    for place in np.ndindex(*new.shape):
        at = (*place[:-1], ids[place])
        updated[at] = {"set": new[place], "add": updated[at] + new[place]}.get(
            reduction, max(updated[at], new[place])
        )
    return updated


@pytest.mark.parametrize("reduction", few_emulated(("set", "add", "maximum"), "add"))
def test_updates_of_rows(backend: str, reduction: str) -> None:
    """Scatters to rows with repeated indices. Some row lengths are a multiple of a vector, others
    are not. The values are such that additions in another order would give other results.
    """
    rng = np.random.default_rng(1)
    cases: list[Built] = []
    for shape, many, among, dtype in (
        ((MATRIX_ROWS, 256), 150, 256, ark.fp32),
        ((2, MATRIX_ROWS, 72), 70, 5, ark.fp32),
        ((MATRIX_ROWS, 41), 3, 41, ark.fp32),
        ((MATRIX_ROWS, 33), 129, 33, ark.int32),
        ((MATRIX_ROWS, 64), 64, 64, ark.bf16),
    ):
        ids = rng.integers(-among, among, (*shape[:-1], many))
        a, new = rng.integers(-9, 9, shape), rng.integers(-3, 4, ids.shape)
        if dtype is ark.fp32:
            a, new = (v.astype(np.float32) * np.float32(0.1) for v in (a, new))
            new[..., ::7] *= np.float32(1e6)
        inputs = [(a, dtype), (ids, ark.int64), (new, dtype)]
        cases.append(
            (
                f"{shape} {many} {dtype}",
                inputs,
                lambda t, i, u: ark.scatter_elements(t, i, u, -1, reduction),
                scattered(a, ids, new, reduction),
            )
        )
    assert not any(".copy" in op for op in check(backend, cases))  # no separate copy of the rows


def test_updates_in_place_and_of_a_part(backend: str) -> None:
    rng = np.random.default_rng(2)
    a = rng.integers(-9, 9, (MATRIX_ROWS, 90)).astype(np.float32)
    ids, new = (
        rng.integers(0, 90, (MATRIX_ROWS, 40)),
        rng.integers(-9, 9, (MATRIX_ROWS, 40)).astype(np.float32),
    )
    some = ids[:20]
    want = a.copy()
    want[:20] = scattered(a[:20], some, new[:20], "add")

    def in_place(t: Tensor, i: Tensor, u: Tensor) -> Tensor:
        kept = ark.copy(t)
        return ark.scatter_elements(kept, i, u, 1, "add", output=kept)

    def of_a_part(t: Tensor, i: Tensor, u: Tensor) -> Tensor:
        return ark.scatter_elements(t, i, u, 1, "add")

    whole: Inputs = [(a, ark.fp32), (ids, ark.int32), (new, ark.fp32)]
    part: Inputs = [(a, ark.fp32), (some, ark.int32), (new[:20], ark.fp32)]
    check(
        backend,
        [
            ("in place", whole, in_place, scattered(a, ids, new, "add")),
            ("of a part", part, of_a_part, want),
        ],
    )


@pytest.mark.emulated("slow")
def test_largest_of_rows(backend: str) -> None:
    """topk of rows with equal elements, of increasing rows, and of rows of -inf. Some row lengths
    are a multiple of a vector, others are not.
    """
    rng = np.random.default_rng(3)
    cases: list[Built] = []
    for columns, k, dtype, kind in (
        (700, 8, ark.fp32, "any"),
        (264, 32, ark.bf16, "equals"),
        (77, 5, ark.fp16, "equals"),
        (600, 1, ark.fp32, "rising"),
        (48, 33, ark.fp32, "equals"),
        (50, 20, ark.fp32, "infinite"),
    ):
        x = rng.standard_normal((MATRIX_ROWS, columns))
        if kind == "equals":
            x = np.floor(x * 9)
        if kind == "rising":
            x = np.broadcast_to(np.arange(columns), x.shape)
        if kind == "infinite":
            x = np.where(x < 1.5, -np.inf, x.round(1))
        x = x.astype(dtype.numpy).astype(np.float32)
        order = np.argsort(-x, 1, kind="stable")[:, :k]
        name, inputs = f"{columns} {k} {kind}", [(x, dtype)]
        best = np.take_along_axis(x, order, 1)
        cases += [
            (f"values {name}", inputs, lambda t, k=k: ark.topk(t, k)[0], best),
            (f"places {name}", inputs, lambda t, k=k: ark.topk(t, k)[1], order),
            (f"argmax {name}", inputs, ark.argmax, x.argmax(1)),
        ]
    check(backend, cases)


@pytest.mark.emulated("slow")
def test_rows_that_are_dealt(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a large matrix are assigned to the processors in turn, one by one. Each equals
    NumPy's, and equals that of the small matrix except for roundings that another kernel's code may
    change.
    """
    rng = np.random.default_rng(6)
    chosen, results = registry.get(backend), []
    x = rng.standard_normal((44, 264)).astype(ark.bf16.numpy)
    w = rng.standard_normal(264).astype(ark.bf16.numpy)
    for large in (False, True):
        monkeypatch.setattr(norms, "is_large", lambda *_, large=large: large)
        model = Model()
        with use_model(model):
            t = Tensor(model.graph.tensor(x.shape, ark.bf16, arena="state", name="x"), model)
            u = Tensor(model.graph.tensor(w.shape, ark.bf16, arena="state", name="w"), model)
            outputs = [
                ark.softmax(t),
                ark.layernorm(t),
                ark.rmsnorm(t, u, 1e-5),
                ark.log_softmax(t),
            ]
            for n, result in enumerate(outputs):
                kept = model.graph.tensor(x.shape, ark.bf16, arena="state", name=f"out{n}")
                ark.copy(result, Tensor(kept, model))
        with contextlib.closing(chosen.open(0)) as device:
            # Rows are assigned in advance only on machines without claims, where a processor cannot
            # take its next rows at run time (test_claims.py).
            machine = device.machine.with_processors(4).without_capabilities(Capability.CLAIMS)
            ready = plan(model.graph, machine, {"fuse": False})
            verify([ready])
            rows = [op.params for op in ready.ops if op.kind == "row_norm"]
            apart = large and device.machine.cooperative
            assert [p.get("dealt", False) for p in rows] == [apart] * 4
            with Executor(ready, chosen, device) as executor:
                executor.write("x", x)
                executor.write("w", w)
                executor.start(2).wait()
                results.append([executor.read(f"out{n}").astype(np.float64) for n in range(4)])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-2)
    wide, weight = x.astype(np.float64), w.astype(np.float64)
    grown = np.exp(wide - wide.max(1, keepdims=True))
    softmax = grown / grown.sum(1, keepdims=True)
    off = wide - wide.mean(1, keepdims=True)
    root = np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5)
    wanted = (softmax, off / np.sqrt((off**2).mean(1, keepdims=True) + 1e-6), wide / root * weight)
    for got, want in zip(results[1], (*wanted, np.log(softmax)), strict=True):
        np.testing.assert_allclose(got.reshape(x.shape), want, rtol=1e-2, atol=1e-3)


@pytest.mark.emulated("slow")
def test_rows_that_are_looked_up(backend: str) -> None:
    rng = np.random.default_rng(4)
    cases: list[Built] = []
    for shape, axis, dtype in (
        ((90, 64), 0, ark.bf16),
        ((90, 33), 0, ark.fp32),
        ((5, 40, 24), 1, ark.fp32),
        ((6, 50), 1, ark.int32),
    ):
        x, ids = rng.integers(-99, 99, shape), rng.integers(-shape[axis], shape[axis], 70)
        cases.append(
            (
                f"{shape} {axis}",
                [(x, dtype), (ids, ark.int64)],
                lambda t, i, axis=axis: ark.gather(t, i, axis),
                np.take(x, ids, axis),
            )
        )
    x = rng.integers(-99, 99, (4, 9, 8, 64))
    cases += [
        ("heads", [(x, ark.bf16)], lambda t: ark.transpose(t, [0, 2, 1, 3]), x.swapaxes(1, 2)),
        ("joined", [(x, ark.bf16)], lambda t: ark.concat([t, t], 3), np.concatenate([x, x], 3)),
    ]
    check(backend, cases)
