"""examples/adasum: the weights equal torch's in one process, combined in float64."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import ark
from examples.adasum import adasum as example
from tests.cases.adasum import small_data, torch_weights
from tests.slow import slow

STEPS, BATCH = 4, 16


def on_a_rank(folder: str) -> None:
    ark.init(backend="cpu")
    _, ended = example.train(small_data(), STEPS, BATCH, optimizers=("momentum", "LAMB"))
    flat = {f"{name}.{i}": w for name, result in ended.items() for i, w in enumerate(result)}
    np.savez(Path(folder) / f"{ark.Model.get_rank()}.npz", **flat)


@slow
@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_are_those_of_torch(world: int, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    assert ark.launch(world, on_a_rank, str(tmp_path)) == 0
    result = [np.load(tmp_path / f"{rank}.npz") for rank in range(world)]
    for method in example.METHODS:
        want = torch_weights(
            small_data(), world, method, lambda p: torch.optim.SGD(p, 0.4, 0.9), STEPS, BATCH
        )
        for layer, wanted in enumerate(want):
            name = f"momentum {method}.{layer}"
            np.testing.assert_allclose(result[0][name], wanted, atol=2e-5, err_msg=name)
            for other in result[1:]:
                np.testing.assert_array_equal(other[name], result[0][name])
    for layer in range(2):
        forms = [result[0][f"LAMB {form}.{layer}"] for form in ("tree", "halving")]
        np.testing.assert_allclose(*forms, atol=1e-6)


@slow
def test_lamb_differs_from_torch_only_by_rounding() -> None:
    """Adasum by a tree and by halving give the same weights with LAMB in float64 after 100 steps.
    If the initial weights differ by one rounding of float32, the results differ by more than 1e-3,
    so such a difference in float32 is not an error.
    """
    pytest.importorskip("torch")
    lamb = pytest.importorskip("tests.lamb")
    ends = [
        torch_weights(
            example.digits(), 4, form, lambda p: lamb.Lamb(p, 0.03, (0.9, 0.999), 0.01), 100, 128, n
        )
        for form, n in (("tree", 0.0), ("halving", 0.0), ("tree", 6e-8))
    ]
    forms, nudged = (
        max(np.abs(a - b).max() for a, b in zip(ends[0], other, strict=True)) for other in ends[1:]
    )
    assert forms < 1e-9 < 1e-3 < nudged


def adasum_of(a: list[float], b: list[float]) -> list[float]:
    ark.init(backend="cpu")
    first, second = ark.tensor([2]), ark.tensor([2])
    result = example.tree([first, second])
    with ark.Runtime() as runtime:
        runtime.launch()
        first.from_numpy(np.array(a, np.float32))
        second.from_numpy(np.array(b, np.float32))
        runtime.run()
        return [float(x) for x in result.to_numpy()]


def test_pairs_have_the_properties_of_the_paper() -> None:
    assert adasum_of([1, 0], [1, 1]) == [1.25, 0.75]
    assert adasum_of([2, 0], [0, 3]) == [2, 3]  # orthogonal: sum
    assert adasum_of([1, 2], [1, 2]) == [1, 2]  # equal: mean
    assert adasum_of([0, 0], [1, 2]) == [1, 2]  # one is zero: the other


@pytest.mark.parametrize("power", [-30, 30, 37])
def test_huge_and_tiny_numbers(power: int) -> None:
    """Adasum is right for numbers whose squares overflow or underflow fp32, because its dot
    products are scaled.
    """
    scale = np.float32(10.0**power)
    actual = adasum_of([1 * scale, 0], [1 * scale, 1 * scale])
    np.testing.assert_allclose(actual, np.float32([1.25, 0.75]) * scale, rtol=1e-6)
    # The second vector is smaller than the first by a factor of sqrt(10^power).
    small = np.float32(10.0 ** (power / 2))
    actual = adasum_of([1 * scale, 0], [0, small])
    np.testing.assert_allclose(actual, [scale, small], rtol=1e-6)


def test_figure_is_an_svg() -> None:
    names = [f"{o} {m}" for o in example.OPTIMIZERS for m in example.METHODS]
    kinds = ("accuracy", "orthogonality 0", "orthogonality 1")
    curves = {f"{name} {kind}": np.linspace(0, 1, 5) for name in names for kind in kinds}
    curves["SGD sum accuracy"][2] = np.nan
    assert len(ElementTree.fromstring(example.drawn(curves, 4, list(example.OPTIMIZERS)))) > 6 * 6
