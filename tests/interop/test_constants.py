"""Parts of torch graphs that depend on no input are computed when the graph is compiled."""

from __future__ import annotations

from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch import fx  # noqa: E402

from ark.interop.torch import backend, compile  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()


def masked(x: Any) -> Any:
    """Adds a mask that is filled region by region, as Swin transformers do for the mask of shifted
    windows.
    """
    mask = x.new_zeros((8, 8))
    mask[0:3, 2:5] = 7
    mask[3:, :] = 2
    many = (mask.unsqueeze(0) - mask.unsqueeze(1)).sum(0).expand(3, 8, 8)
    return x + many.transpose(1, 2)


def compiled_nodes(function: Any, monkeypatch: pytest.MonkeyPatch, *given: Any) -> list[fx.Node]:
    """Compiles and calls the function, compares, and returns the nodes after folding."""
    seen: list[fx.Node] = []
    fold = compile.fold_constants

    def keeping(module: fx.GraphModule) -> None:
        fold(module)
        seen.extend(n for n in module.graph.nodes if n.op not in ("placeholder", "output"))

    monkeypatch.setattr(compile, "fold_constants", keeping)
    call = torch.compile(function, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(call(*given), function(*given))
    return seen


def test_mask_that_is_filled_in_regions_is_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = compiled_nodes(masked, monkeypatch, torch.randn(8, 8))
    assert [n.op for n in nodes] == ["get_attr", "call_function"]


def test_results_of_the_graph_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that is a result of the graph is not made a constant of the compiled graph: a caller
    may change the result, and the next call would return the changed value.
    """

    def function(x: Any) -> Any:
        table = torch.arange(4) * 2
        return table, x[0:2] + torch.zeros_like(x)[0:2]

    nodes = compiled_nodes(function, monkeypatch, torch.randn(3, 3))
    assert not any(str(n.target).startswith("_folded") for n in nodes)
    call = torch.compile(function, backend=backend)
    x = torch.randn(3, 3)
    call(x)[0].add_(5)
    torch.testing.assert_close(call(x), function(x))


def test_random_numbers_are_drawn_in_each_call() -> None:
    def function(x: Any) -> Any:
        return x + torch.rand(3).cumsum(0)

    call = torch.compile(function, backend=backend)
    x = torch.zeros(3)
    assert not torch.equal(call(x), call(x))


def test_masks_of_indices_stay_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks that are computed from indices are not folded to constants, because the planner
    recognises causal masks by the ops that compute them.
    """

    def function(x: Any) -> Any:
        places = torch.arange(8)
        return x.masked_fill(places[None] > places[:, None], 0.0)

    nodes = compiled_nodes(function, monkeypatch, torch.randn(8, 8))
    assert not any(str(n.target).startswith("_folded") for n in nodes)


def test_large_constant_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: Any) -> Any:
        table = torch.zeros(1 << 19)
        table[3:] = 1.0
        return x + table

    nodes = compiled_nodes(function, monkeypatch, torch.zeros(1 << 19))
    assert not any(str(n.target).startswith("_folded") for n in nodes)


def test_gradients_pass_folded_constants() -> None:
    mine, theirs = (torch.ones(8, 8).requires_grad_() for _ in range(2))
    torch.compile(masked, backend=backend)(mine).square().sum().backward()
    masked(theirs).square().sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)
