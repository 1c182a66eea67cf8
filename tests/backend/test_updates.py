"""An optimizer's update of a parameter and its moments, which is one op (ark/lower/rewrite/
fuse_updates.py), beside torch.optim. Shapes have odd sizes, and sizes of several tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import DataType
from ark.lower.pipeline import plan
from tests.emulated import few_emulated

torch = pytest.importorskip("torch")

STEPS, RATE = 4, 0.03
SHAPES = ((1, 1), (7,), (2304,), (33, 65), (96, 512), (3, 5, 129))
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "adam": (
        lambda p: ark.optim.Adam(p, RATE, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, RATE, weight_decay=0.1),
    ),
    "adamw": (
        lambda p: ark.optim.AdamW(p, RATE, (0.7, 0.9), weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, RATE, (0.7, 0.9), weight_decay=0.1),
    ),
    "momentum": (
        lambda p: ark.optim.SGD(p, RATE, 0.9, 0.1),
        lambda p: torch.optim.SGD(p, RATE, 0.9, weight_decay=0.1),
    ),
}


def _rounded(array: np.ndarray, dtype: DataType) -> np.ndarray:
    return array.astype(dtype.numpy).astype(np.float32)


def _in_torch(
    make: Callable[[Any], Any], starts: list[np.ndarray], slopes: list[np.ndarray], dtype: DataType
) -> list[np.ndarray]:
    """The parameters after STEPS updates in fp32, rounded to their type after each update."""
    weights = [torch.tensor(s).requires_grad_() for s in starts]
    optimizer = make(weights)
    for step in range(1, STEPS + 1):
        for weight, slope in zip(weights, slopes, strict=True):
            weight.grad = torch.tensor(_rounded(slope * step, dtype))
        optimizer.step()
        for weight in weights:
            weight.data = torch.tensor(_rounded(weight.detach().numpy(), dtype))
    return [w.detach().numpy() for w in weights]


def _update(name: str, dtype: DataType) -> tuple[list[ark.Tensor], list[ark.Tensor]]:
    """Adds updates of parameters of all shapes. The gradients are those given times the number of
    the step. Returns the parameters and the given gradients.
    """
    weights = [ark.parameter(s, dtype) for s in SHAPES]
    slopes = [ark.tensor(s, ark.fp32) for s in SHAPES]
    step = ark.tensor([1], ark.fp32)
    count = ark.add(step, 1.0, step)
    gradients = [ark.cast(ark.mul(s, count), dtype) for s in slopes]
    OPTIMIZERS[name][0](weights).step(gradients)
    return weights, slopes


@pytest.mark.parametrize(
    "dtype", few_emulated((ark.fp32, ark.bf16, ark.fp16), ark.bf16), ids=lambda t: t.name
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_those_of_torch(backend: str, name: str, dtype: DataType) -> None:
    random = np.random.default_rng(11)
    starts = [_rounded(random.normal(size=s).astype(np.float32), dtype) for s in SHAPES]
    given = [random.normal(size=s).astype(np.float32) for s in SHAPES]
    weights, slopes = _update(name, dtype)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in zip((*weights, *slopes), (*starts, *given), strict=True):
            tensor.from_numpy(array.astype(tensor.dtype().numpy))
        runtime.run(STEPS)
        got = [w.to_numpy().astype(np.float32) for w in weights]
    want = _in_torch(OPTIMIZERS[name][1], starts, given, dtype)
    # Two of the four steps may round to another neighbour.
    unit = {ark.fp32: 1e-5, ark.bf16: 2**-6, ark.fp16: 2**-9}[dtype]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=unit, atol=unit * RATE)
        if dtype != ark.fp32:  # a difference before rounding seldom changes the rounded value
            assert np.mean(a != b) < 0.02 or a.size < 100


@pytest.mark.parametrize("machine", ["h200", "mi300x"])
def test_parameter_and_its_moments_are_one_op(machine: str) -> None:
    with ark.use_model(ark.Model()) as model:
        weight = ark.parameter((512, 1024), ark.bf16)
        ark.optim.AdamW([weight], RATE).step([ark.tensor((512, 1024), ark.bf16)])
    planned = plan(model.graph, registry.machine(machine))
    large = [op for op in planned.ops if planned.tensors[op.operands[-1]].shape[-1] > 1]
    assert [op.kind for op in large] == ["fusion"]
    assert len(large[0].params["stores"]) == 3
