"""torch functions that read or write elements by index (such as index_add), by torch.compile on the
CPU, compared with eager torch.
"""

from __future__ import annotations

from typing import Any

import pytest

import ark
from ark.interop.torch import backend
from tests.cases.lookup import same, torch


def test_sums_over_the_edges_of_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    """index_add equals torch's, with equal and negative indices, along either dimension, and with a
    number as the source.
    """
    x, at = torch.randn(10, 6), torch.tensor([3, 0, 3, 9, 3, -1])

    def function(x: torch.Tensor, at: torch.Tensor) -> Any:
        rows = torch.zeros_like(x).index_add(0, at % 10, x[at])
        columns = x.index_add(1, at.abs() % 6, x[:, :6] * 2.0)
        return rows, columns, torch.zeros(10).index_put((at,), torch.ones(()), accumulate=True)

    same(function, [x, at], capsys)


def test_writes_by_index(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(5, 6, 7)
    a, b = torch.tensor([[4, 0], [2, 1]]), torch.tensor([1, 3])

    def function(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        one, two, three = x.clone(), x.clone(), x.clone()
        one[a] = 3.0
        two[:, b, b] = x[:, :2, 0]
        three[:, a, a] += x[0, 0, 0]
        three[:, 1::2, ::3] = x[:, :3, :3]
        return one, two, three

    same(function, [x, a, b], capsys)


def test_gradient_of_an_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()
    table = torch.nn.Embedding(9, 4, padding_idx=2)
    ids = torch.tensor([[1, 2, 8], [1, 1, 0]])
    compiled = torch.compile(table, backend=backend)
    compiled(ids).sin().sum().backward()
    got = table.weight.grad.clone()
    table.zero_grad()
    table(ids).sin().sum().backward()
    torch.testing.assert_close(got, table.weight.grad)
    assert "stay in torch" not in capsys.readouterr().err


def test_constants_in_a_function(capsys: pytest.CaptureFixture[str]) -> None:
    """The constants of the graph are real tensors, although its other tensors are fake ones."""
    x = torch.randn(4, 3)

    def function(x: torch.Tensor) -> Any:
        scaled = x * torch.tensor([1.0, 2.0, 3.0])
        scaled[0] = 3.0
        return scaled + torch.tensor(0.5)

    same(function, [x], capsys)

    def partly(x: torch.Tensor) -> Any:
        return torch.sort(x * torch.tensor([1.0, 2.0, 3.0]))[0] + torch.tensor([4.0, 5.0, 6.0])

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(partly, backend=backend)(x), partly(x))
