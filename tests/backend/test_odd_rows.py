"""Scores and logits with rows of odd length, which GPUs store at multiples of 16 bytes: results and
gradients equal torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import ark
from tests.slow import few

torch = pytest.importorskip("torch")

MAX_RELATIVE_ERROR = 2**-6  # of bf16 results, relative to the largest element
LENGTHS = ((49, 64), (50, 16), (131, 65), (197, 40), (390, 9))
CLASSES = ((17, 49), (64, 197), (65, 1003), (10, 50257))


def rows(*shape: int) -> np.ndarray:
    """Random numbers that bf16 represents exactly."""
    random = np.random.default_rng(sum(shape)).normal(size=shape)
    return random.astype(ark.bf16.numpy).astype(np.float32)


def run(given: Mapping[ark.Tensor, np.ndarray], results: Sequence[ark.Tensor]) -> list[Any]:
    """The results of one iteration."""
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in given.items():
            tensor.from_numpy(array)
        runtime.run()
        return [t.to_numpy().astype(np.float32) for t in results]


def near(got: np.ndarray, want: Any) -> None:
    """Asserts that two tensors differ by rounding to bf16 only."""
    expected = want.detach().numpy()
    bound = MAX_RELATIVE_ERROR * float(np.abs(expected).max())
    np.testing.assert_allclose(got, expected.reshape(got.shape), rtol=0, atol=bound)


@pytest.mark.parametrize("length, queries", few(2, LENGTHS))
def test_attention_over_an_odd_number_of_keys(backend: str, length: int, queries: int) -> None:
    """Scores of products, softmax and products with values, forward and backward."""
    shapes = (2, queries, 64), (2, length, 64), (2, length, 64), (2, queries, 64)
    arrays = [rows(*shape) for shape in shapes]
    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays[:3]]
    wanted = torch.softmax(leaves[0] @ leaves[1].mT / 8, -1) @ leaves[2]
    wanted.backward(torch.from_numpy(arrays[3]))
    q, k, v, weights = tensors = [ark.tensor(shape, ark.bf16) for shape in shapes]
    scores = ark.mul(ark.matmul(q, k, transpose_other=True), 0.125)
    result = ark.matmul(ark.softmax(scores), v)
    gradients = ark.grad([result], [q, k, v], [weights])
    given = dict(zip(tensors, arrays, strict=True))
    got = run(given, [result, *gradients])
    for one, want in zip(got, [wanted, *(leaf.grad for leaf in leaves)], strict=True):
        near(one, want)


@pytest.mark.parametrize("count, classes", few(2, CLASSES))
def test_loss_over_an_odd_number_of_classes(backend: str, count: int, classes: int) -> None:
    """A head, a cross entropy and the gradients of the head's input and weight."""
    arrays = [rows(count, 64), rows(classes, 64), np.arange(count) * 7919 % classes]
    arrays[2][1] = -100
    leaves = [torch.from_numpy(a).requires_grad_() for a in arrays[:2]]
    logits = (leaves[0] @ leaves[1].T).to(torch.bfloat16).float()
    wanted = torch.nn.functional.cross_entropy(logits, torch.from_numpy(arrays[2]))
    wanted.backward()
    x, weight = (ark.tensor(a.shape, ark.bf16) for a in arrays[:2])
    targets = ark.tensor([count], ark.int32)
    loss = ark.cross_entropy(ark.matmul(x, weight, transpose_other=True), targets)
    gradients = ark.grad(loss, [x, weight])
    got = run(dict(zip((x, weight, targets), arrays, strict=True)), [loss, *gradients])
    for one, want in zip(got, [wanted, *(leaf.grad for leaf in leaves)], strict=True):
        near(one, want)
