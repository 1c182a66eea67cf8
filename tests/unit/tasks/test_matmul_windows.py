"""Convolutions as products with a matrix of windows (im2col) that is not stored: the device
function for all machines, run on a CPU and compared with torch, the accesses of its tasks compared
with their declarations, and refusals.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli.measure.tune import products
from ark.errors import PlanError
from ark.lower.pipeline import plan as make_plan
from ark.lower.registry import get
from ark.plan import kind as kinds
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.accesses import check
from tests.windows import in_place

Shape = tuple[int, ...]
# The convolutions: (shape of the input, shape of the weights, options, index of the operand that
# has the windows).
CASES: list[tuple[Shape, Shape, dict[str, Any], int]] = [
    ((2, 64, 6, 8), (24, 64, 3, 3), {"padding": 1}, 1),
    ((3, 64, 6, 7), (16, 64, 3, 3), {"padding": 1}, 0),
    ((2, 64, 8, 8), (16, 64, 3, 2), {"stride": (2, 1), "padding": ((1, 1), (0, 1))}, 1),
    ((1, 128, 9, 9), (8, 128, 3, 3), {"stride": 2, "padding": 2, "dilation": 2}, 0),
    ((2, 64, 40), (8, 64, 5), {"stride": 3, "padding": 2}, 0),
    ((3, 64, 8, 8), (8, 64, 1, 1), {"stride": 2}, 1),
]


def planned(x: Shape, w: Shape, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Plan:
    model = ark.Model(0, 1)
    with ark.use_model(model):
        given, weight = ark.tensor(x, ark.bf16, name="x"), ark.tensor(w, ark.bf16, name="w")
        ark.conv(given, weight, **options, name="out")
    in_place(monkeypatch)
    task_plan = make_plan(model.graph, registry.machine("cpu-2"))
    verify([task_plan])
    return task_plan


def product_of(task_plan: Plan) -> kinds.Signature:
    (op,) = (op for op in task_plan.ops if op.params.get("windows"))
    return kinds.signature(task_plan, op)


@pytest.mark.parametrize(("x", "w", "options", "side"), CASES)
def test_cpu_multiplies_windows_as_torch_does(
    x: Shape, w: Shape, options: dict[str, Any], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    task_plan = planned(x, w, options, monkeypatch)
    assert product_of(task_plan).params["windows"]["side"] == side
    rng = np.random.default_rng(0)
    values = [rng.integers(-4, 5, shape).astype(ark.bf16.numpy) for shape in (x, w)]
    source, weight = (torch.from_numpy(v.astype(np.float32)) for v in values)
    how = dict(options)
    if isinstance(how.get("padding"), tuple):
        margins = [n for pair in reversed(how.pop("padding")) for n in pair]
        source = torch.nn.functional.pad(source, margins)
    want = getattr(torch.nn.functional, f"conv{len(x) - 2}d")(source, weight, **how)
    backend = registry.get("cpu")
    with contextlib.closing(backend.open(0)) as device, Executor(task_plan, backend, device) as run:
        for name, value in zip("xw", values, strict=True):
            run.write(name, value)
        run.start(1).wait()
        got = run.read("out").astype(np.float32)
    exact = want.bfloat16().float().numpy()
    np.testing.assert_array_equal(got.reshape(exact.shape), exact)


@pytest.mark.parametrize(("x", "w", "options", "side"), CASES[:4])
def test_accesses_equal_declarations(
    x: Shape, w: Shape, options: dict[str, Any], side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert side in (0, 1)
    check(planned(x, w, options, monkeypatch))


def test_cuts_of_window_products_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ark tune` does not measure products with a matrix of convolution windows, because that
    matrix is not in memory.
    """
    assert products([planned(*CASES[0][:3], monkeypatch)]) == []


def test_reference_is_a_product_with_the_matrix() -> None:
    windows = {
        "side": 1,
        "size": [2],
        "stride": [2],
        "dilation": [1],
        "before": [1],
        "sizes": [3],
    }
    source = np.array([[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]])  # (n, places, 2)
    reference = get("matmul").reference
    assert reference is not None
    attrs = {"transpose_a": False, "transpose_b": True, "windows": windows}
    (product,) = reference([np.array([[[[1.0, 0.0, 0.0, 1.0]]]]), source], attrs)
    # The weights select the first channel at the first element of the window and the second channel
    # at the second; the padding is zero.
    assert product.tolist() == [[[[0.0 + 10.0, 2.0 + 30.0, 4.0 + 0.0]]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": [3]}, "window parameters"),
        ({"side": 2}, "do not fit"),
        ({"sizes": [6, 9]}, "do not multiply to"),
        ({"stride": [1 << 16, 1 << 16], "sizes": [1 << 20, 1 << 20]}, "exceed 32 bits"),
    ],
)
def test_other_windows_are_refused(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = product_of(planned(*CASES[0][:3], monkeypatch))
    params = copy.deepcopy(dict(signature.params))
    params["windows"] = {**params["windows"], **change}
    with pytest.raises(PlanError, match=message):
        kinds.get("matmul").check(kinds.Signature("matmul", params, signature.operands))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"transpose_b": False}, "right operand transposed"), ({"splits": 2}, "split along k")],
)
def test_windows_are_supported_in_one_form_only(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = product_of(planned(*CASES[0][:3], monkeypatch))
    changed = kinds.Signature("matmul", {**signature.params, **change}, signature.operands)
    with pytest.raises(PlanError, match=message):
        kinds.get("matmul").check(changed)
