"""Gradients of chains of elementwise ops, which are computed from the chain's inputs (ark/ops/
gradients/reverse.py), beside torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark

torch = pytest.importorskip("torch")

ROOT = math.sqrt(2.0 / math.pi)


def _gelu(x: Any, tanh: Callable[[Any], Any]) -> Any:
    """GELU as transformers' NewGELUActivation writes it."""
    return x * 0.5 * (tanh((x + x * x * x * 0.044715) * ROOT) + 1.0)


CHAINS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "gelu": (lambda x, y: _gelu(x, ark.tanh), lambda x, y: _gelu(x, torch.tanh)),
    "gate": (
        lambda x, y: ark.silu(x) * 3.0 * y,
        lambda x, y: torch.nn.functional.silu(x) * 3.0 * y,
    ),
    "long": (
        lambda x, y: ark.exp(ark.sigmoid(ark.tanh(x * y) * 2.0 + x) * 0.5) * y + x,
        lambda x, y: torch.exp(torch.sigmoid(torch.tanh(x * y) * 2.0 + x) * 0.5) * y + x,
    ),
    "condition": (
        lambda x, y: ark.where(ark.greater(x, 0.0), ark.exp(x) * 2.0, 0.0) * y,
        lambda x, y: torch.where(x > 0.0, torch.exp(x) * 2.0, 0.0) * y,
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_gradients_of_chains_equal_those_of_torch(backend: str, name: str) -> None:
    ours, theirs = CHAINS[name]
    random = np.random.default_rng(9)
    arrays = [random.normal(size=(33, 72)).astype(np.float32) * 2 for _ in range(3)]
    if name == "condition":  # a gradient that the condition drops may be infinite
        arrays[2][:4] = np.where(arrays[0][:4] > 0.0, 1.0, np.inf)
    x, y, given = (ark.tensor([33, 72], ark.fp32) for _ in arrays)
    results = ark.grad([ours(x, y)], [x, y], [given], allow_unused=True)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in zip((x, y, given), arrays, strict=True):
            tensor.from_numpy(array)
        runtime.run()
        got = [None if r is None else r.to_numpy() for r in results]
    a, b, weight = (torch.tensor(array) for array in arrays)
    a.requires_grad_()
    b.requires_grad_()
    total = theirs(a, b)
    want = torch.autograd.grad(total, [a, b], weight, allow_unused=True)
    for ark_gradient, torch_gradient in zip(got, want, strict=True):
        assert (ark_gradient is None) == (torch_gradient is None)
        if ark_gradient is not None:
            np.testing.assert_allclose(ark_gradient, torch_gradient.numpy(), rtol=2e-5, atol=2e-5)


def test_gelu_is_one_op_forward_and_one_backward() -> None:
    with ark.use_model(ark.Model()) as model:
        x, given = (ark.tensor([64, 512], ark.bf16) for _ in range(2))
        result = _gelu(x, ark.tanh)
        before = len(model.graph.nodes)
        ark.grad([result], [x], [given])
        assert len(model.graph.nodes) == before + 1


def test_overwritten_input_keeps_the_chain_apart() -> None:
    """The gradient of x + 1 does not need x, so x may be overwritten after the sum is computed."""
    with ark.use_model(ark.Model()):
        x, given = (ark.tensor([8, 64], ark.fp32) for _ in range(2))
        result = ark.exp(x + 1.0)
        ark.copy(given, output=x)
        ark.grad([result], [x], [given])


def test_gradient_of_a_relu_reads_its_result_alone() -> None:
    """The sum before the relu is not computed again from its two inputs."""
    with ark.use_model(ark.Model()) as model:
        x, y, given = (ark.tensor([64, 512]) for _ in range(3))
        result = ark.relu(x + y)
        before = len(model.graph.nodes)
        ark.grad([result], [x, y], [given])
        read = {t.id for n in model.graph.nodes[before:] for t in n.inputs}
    assert read == {result.ir.id, given.ir.id}
