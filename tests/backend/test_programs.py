"""Random programs on a device: the kernel's results equal those of program order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.lower import tiling
from ark.runtime.session import device
from tests.programs import build, contents, reference


@pytest.mark.parametrize(
    "processors",
    [
        pytest.param(n, marks=pytest.mark.emulated(arch))
        for n, arch in ((1, "gfx942"), (2, "gfx1100"), (3, "gfx942"), (5, "gfx1100"))
    ],
)
def test_random_programs(backend: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several random programs in one model, run twice, give the results of program order.
    Intermediate tensors share memory.
    """
    monkeypatch.setattr(tiling, "least_elements", lambda _: 40)
    first: dict[int, np.ndarray] = {}
    kept = []
    for part in range(3):
        inputs, held = build(100 * processors + part, 12)
        first |= contents(inputs, part)
        kept += [*inputs, *held]
    model = ark.current_model()
    plan = ark.Planner(machine=device().machine.with_processors(processors)).plan()
    wanted = reference(model.graph, first, iterations=2)
    with ark.Runtime() as runtime:
        runtime.launch(plan=plan, loop_mode=False)
        for tensor in kept:
            image = first.get(tensor.ir.buffer.id)
            if image is not None:
                shape, offsets = tensor.ir.extents, tensor.ir.offsets
                box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.ir.shape, strict=True))
                tensor.from_numpy(image.reshape(shape)[box])
        runtime.run(2)
        for tensor in kept:
            ir = tensor.ir
            box = tuple(slice(o, o + n) for o, n in zip(ir.offsets, ir.shape, strict=True))
            size = int(np.prod(ir.extents))
            want = wanted[ir.buffer.id][:size].reshape(ir.extents)[box]
            scale = max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(tensor.to_numpy() / scale, want / scale, atol=2e-4)


def layer(x: Any, norm: Any, weight: Any, residual: Any) -> Any:
    product = ark.matmul(ark.rmsnorm(x, norm, eps=1e-5), weight, transpose_other=True)
    return ark.add(product, residual)


def expected(x: np.ndarray, norm: np.ndarray, weight: np.ndarray, residual: Any) -> np.ndarray:
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * norm
    return normed @ weight.T.astype(np.float64) + residual


def test_fused_linear_layers(backend: str) -> None:
    """Linear layers that the planner fuses, and some that it must not fuse, because a result is
    used elsewhere, written in between, or updated in place.
    """
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((3, 40)).astype(np.float32),
        "norm": rng.random(40).astype(np.float32),
        "square": (rng.standard_normal((40, 40)) / 8).astype(np.float32),
        "wide": (rng.standard_normal((70, 40)) / 8).astype(np.float32),
        "residual": rng.standard_normal((3, 70)).astype(np.float32),
    }
    tensors = {
        name: (ark.parameter if name in ("norm", "square", "wide") else ark.tensor)(list(a.shape))
        for name, a in arrays.items()
    }
    x, norm, square, wide, residual = tensors.values()
    plain = layer(x, norm, wide, residual)

    normed = ark.rmsnorm(x, norm, eps=1e-5)  # held by the test, so it must be written
    held = ark.matmul(normed, wide, transpose_other=True)

    moved = ark.copy(x)
    stale = ark.matmul(ark.rmsnorm(moved, norm, eps=1e-5), wide, transpose_other=True)
    ark.mul(moved, 0.0, output=moved)  # written between the product and the sum
    late = ark.add(stale, residual)
    del stale

    place = ark.copy(x)
    in_place = ark.add(ark.matmul(place, square, transpose_other=True), place, output=place)

    changed = ark.parameter([70, 40])
    ark.mul(wide, 2.0, output=changed)
    doubled = ark.matmul(x, changed, transpose_other=True)

    plan = ark.Planner().plan()
    assert plan.inner is not None
    kinds = [op.kind for op in plan.inner.ops]
    assert "linear" in kinds, "nothing was fused"
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, tensor in tensors.items():
            tensor.from_numpy(arrays[name])
        runtime.run(2)
        a = arrays
        close = {"rtol": 2e-5, "atol": 2e-5}
        want = expected(a["x"], a["norm"], a["wide"], a["residual"])
        np.testing.assert_allclose(plain.to_numpy(), want, **close)
        np.testing.assert_allclose(late.to_numpy(), want, **close)
        zero = np.zeros(())
        want = expected(a["x"], a["norm"], a["wide"], zero)
        np.testing.assert_allclose(held.to_numpy(), want, **close)
        want = expected(a["x"], a["norm"], np.eye(40), zero)
        np.testing.assert_allclose(normed.to_numpy(), want, **close)
        want = a["x"] @ a["square"].T + a["x"]
        np.testing.assert_allclose(in_place.to_numpy(), want, **close)
        np.testing.assert_allclose(doubled.to_numpy(), a["x"] @ a["wide"].T * 2, **close)
