"""A log-softmax whose elements are looked up is not stored. Losses and gradients equal torch's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.frontend.tensor import Tensor
from ark.lower.prepare import prepare
from tests.slow import few

torch = pytest.importorskip("torch")


def loss(x: Tensor, ids: Tensor) -> Tensor:
    return ark.cross_entropy(x, ids)


def smoothed(x: Tensor, ids: Tensor) -> Tensor:
    """A loss that also reads the sum of each row."""
    below = ark.log_softmax(ark.cast(x, ark.fp32))
    chosen = ark.gather_elements(below, ark.reshape(ids, [x.shape()[0], 1]), 1)
    return ark.add(ark.reduce_sum(below, 1), chosen)


def stored(x: Tensor, ids: Tensor) -> Tensor:
    """A loss whose log-softmax is also an operand of a product."""
    below = ark.log_softmax(x)
    chosen = ark.gather_elements(below, ark.reshape(ids, [x.shape()[0], 1]), 1)
    return ark.add(ark.matmul(below, below, transpose_other=True), chosen)


def overwritten(x: Tensor, ids: Tensor) -> Tensor:
    """A loss whose rows are overwritten before an element is looked up."""
    below = ark.log_softmax(x)
    ark.mul(x, 2.0, output=x)
    return ark.gather_elements(below, ark.reshape(ids, [x.shape()[0], 1]), 1)


def not_looked_up(x: Tensor, ids: Tensor) -> Tensor:
    return ark.mul(ark.log_softmax(x), ark.cast(ark.reshape(ids, [x.shape()[0], 1]), ark.fp32))


def kinds(build: Callable[[Tensor, Tensor], Tensor], rows: int = 6, classes: int = 37) -> list[str]:
    """The types of the nodes that the program is rewritten to."""
    with ark.use_model(ark.Model()) as model:
        x, ids = ark.tensor([rows, classes]), ark.tensor([rows], ark.int32)
        build(x, ids)
    graph = prepare(model.graph, registry.machine("h200")).graph
    return [n.type for n in graph.nodes if not n.virtual]


@pytest.mark.parametrize("build", [loss, smoothed])
def test_logarithms_of_classes_are_not_stored(build: Callable[..., Tensor]) -> None:
    assert "log_softmax" not in kinds(build)
    assert kinds(build).count("reduce_logsumexp") == 1


@pytest.mark.parametrize("build", [stored, overwritten, not_looked_up])
def test_other_log_softmaxes_stay(build: Callable[..., Tensor]) -> None:
    assert kinds(build).count("log_softmax") == 1


def test_log_softmax_of_few_classes_stays() -> None:
    assert kinds(loss, classes=31).count("log_softmax") == 1
    assert "log_softmax" not in kinds(loss, classes=32)


SIZES = ((1, 32), (5, 37), (3, 64), (7, 197), (33, 1000), (2, 50257))


@pytest.mark.parametrize("rows, classes", few(3, SIZES))
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_losses_and_gradients_equal_torchs(rows: int, classes: int, kind: str) -> None:
    ark.init(backend="cpu")
    generator = torch.Generator().manual_seed(rows * classes)
    host = torch.bfloat16 if kind == "bf16" else torch.float32
    logits = (4 * torch.randn(rows, classes, generator=generator)).to(host)
    logits[0, 0] = -torch.inf
    targets = torch.randint(1, classes, (rows,), generator=generator)
    targets[rows // 2 + 1 :: 3] = -100
    x = ark.Tensor.from_torch(logits)
    result = ark.cross_entropy(x, ark.Tensor.from_torch(targets))
    gradient = ark.grad(result, [x])[0]
    leaf = logits.float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(leaf, targets)
    wanted.backward()
    got = torch.as_tensor(gradient.eval()).float()
    bound = 2**-8 if kind == "bf16" else 1e-5
    np.testing.assert_allclose(got.numpy(), leaf.grad.numpy(), rtol=bound, atol=bound * 1e-3)
    assert torch.as_tensor(result.eval()).item() == pytest.approx(wanted.item(), rel=1e-5)


def test_rows_with_infinite_elements() -> None:
    """An infinite element makes its row's loss NaN, as in torch, also if other rows are finite."""
    ark.init(backend="cpu")
    logits = torch.zeros(3, 40)
    logits[0, 4], logits[1] = torch.inf, -torch.inf
    x, ids = ark.Tensor.from_torch(logits), torch.zeros(3, 1, dtype=torch.int32)
    below = ark.gather_elements(ark.log_softmax(x), ark.Tensor.from_torch(ids), 1)
    wanted = torch.log_softmax(logits, 1)[:, :1]
    np.testing.assert_allclose(torch.as_tensor(below.eval()).numpy(), wanted.numpy(), rtol=1e-6)
