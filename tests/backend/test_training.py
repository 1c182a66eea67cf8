"""Training: forward, gradients and update as iterations of one kernel, with torch's loss curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from tests.training import CURVE_TOLERANCE, learn, perceptron, torch_perceptron

torch = pytest.importorskip("torch")
Lamb = pytest.importorskip("tests.lamb").Lamb

pytestmark = pytest.mark.emulated("slow")

OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (lambda p: ark.optim.SGD(p, 0.3), lambda p: torch.optim.SGD(p, 0.3)),
    "momentum": (
        lambda p: ark.optim.SGD(p, 0.1, 0.9, 0.01),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01),
    ),
    "nesterov": (
        lambda p: ark.optim.SGD(p, 0.1, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True),
    ),
    "adam": (
        lambda p: ark.optim.Adam(p, 0.02, weight_decay=0.02),
        lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.02),
    ),
    "adamw": (
        lambda p: ark.optim.AdamW(p, 0.02, (0.8, 0.95), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.02, (0.8, 0.95), weight_decay=0.1),
    ),
    "adamw with moments on the host": (
        lambda p: ark.optim.AdamW(p, 0.02, (0.8, 0.95), weight_decay=0.1, offload=True),
        lambda p: torch.optim.AdamW(p, 0.02, (0.8, 0.95), weight_decay=0.1),
    ),
    "lamb": (
        lambda p: ark.optim.LAMB(p, 0.05, (0.8, 0.95), weight_decay=0.1),
        lambda p: Lamb(p, 0.05, (0.8, 0.95), 0.1),
    ),
}


def test_optimizers(backend: str) -> None:
    """Each of the optimizers trains a perceptron as in torch, for 30 steps, all in one kernel."""
    steps = 30
    random = np.random.default_rng(5)
    data = [random.normal(size=(12, 8)), random.integers(0, 4, 12)]
    data[1][3] = -100  # a row that the loss ignores
    trained = {name: perceptron(ours, steps) for name, (ours, _) in OPTIMIZERS.items()}
    starts = {}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, (module, given, _) in trained.items():
            shapes = {n: p.shape() for n, p in module.params_dict().items()}
            starts[name] = {n: random.normal(size=s) * 0.4 for n, s in shapes.items()}
            module.load_state_dict(starts[name])
            for tensor, array in zip(given, data, strict=True):
                tensor.from_numpy(array)
        runtime.run(steps)
        for name, (_, _, curve) in trained.items():
            want = torch_perceptron(starts[name], data, OPTIMIZERS[name][1], steps)
            got = curve.values.to_numpy()
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=name)
            assert want[-1] < want[0] / 2


def test_shipped_model_learns(backend: str) -> None:
    """Two training steps of the shipped model's first layer, with AdamW and clipped gradients, give
    torch's losses. `nox -s training` runs 200 steps of all layers.
    """
    ours, theirs = learn(2, 8, layers=1)
    np.testing.assert_allclose(ours, theirs, rtol=CURVE_TOLERANCE)
