"""Results have the strides of eager torch, so that code after a graph break which reads memory
reads the same elements. Sizes are padded only if that leaves every element in its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from ark.interop.torch import backend  # noqa: E402
from ark.interop.torch.program import PROGRAMS  # noqa: E402
from ark.interop.torch.strides import laid_out, memory_of  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()
    torch.manual_seed(0)


def _same(got: Any, want: Any) -> None:
    """Compares values and strides."""
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
        assert mine.stride() == theirs.stride()


def _mutated(x: Any) -> Any:
    x.t_()
    return x + 1


def _written_through_a_view(x: Any) -> Any:
    x.t().add_(1)
    return x.t() * 1


def _aliases(x: Any) -> Any:
    y = x * 2
    return y, y.t(), y[1:], x.t()


def _unfolded(x: Any) -> Any:
    return (x + 1).unfold(1, 3, 1)


CASES: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: (x + 1).t(),
    "of a strided input": lambda x: x.t() + 1,
    "expanded": lambda x: (x[:1] + 1).expand(4, 5),
    "a part": lambda x: (x + 1)[:, 1:3],
    "parts of a split": lambda x: (x + 1).split((2, 3), -1),
    "overlapping windows": _unfolded,
    "two views": lambda x: ((x + 1).t(), (x + 1)[0]),
    "aliases": _aliases,
    "metadata of an input": _mutated,
    "an input through a view": _written_through_a_view,
    "three dimensions": lambda x: (x[None].expand(2, 3, 5) * 2).permute(2, 0, 1),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_strides_are_eagers(name: str, dynamic: bool) -> None:
    function = CASES[name]
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    x = torch.randn(3, 5)
    mine, theirs = x.clone(), x.clone()
    got, want = compiled(mine), function(theirs)
    flat = [r if isinstance(r, (tuple, list)) else [r] for r in (got, want)]
    _same([*flat[0], mine], [*flat[1], theirs])


@pytest.mark.parametrize("grad", [False, True])
def test_memory_formats_go_through_a_network(grad: bool) -> None:
    """Channels-last inputs give channels-last results, also with gradients."""
    module = torch.nn.Sequential(
        torch.nn.Conv2d(3, 6, 3), torch.nn.ReLU(), torch.nn.Conv2d(6, 2, 1)
    )
    given = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last)
    mine, theirs = (given.clone().requires_grad_(grad) for _ in range(2))
    with torch.set_grad_enabled(grad):
        got, want = torch.compile(module, backend=backend)(mine), module(theirs)
        _same([got], [want])
        if grad:
            got.square().sum().backward()
            want.square().sum().backward()
            _same([mine.grad], [theirs.grad])


READS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "transposed": (lambda x: x.t() + 1, lambda y: torch.as_strided(y, (3,), (1,))),
    "the whole behind a part": (
        lambda x: (x + 1)[1:, 1:3],
        lambda y: torch.as_strided(y, (3, 5), (5, 1), 0),
    ),
    "expanded": (lambda x: (x[:1] + 1).expand(4, 5), lambda y: torch.as_strided(y, (5,), (1,))),
    "a view as it is": (lambda x: (x + 1).t(), lambda y: y.view(3, 5) if y.stride(0) != 1 else y),
}


@pytest.mark.parametrize("name", READS)
def test_strides_after_a_graph_break_equal_torch(name: str) -> None:
    make, read = READS[name]

    def function(x: Any) -> Any:
        result = make(x)
        torch._dynamo.graph_break()
        return read(result) * 2

    x = torch.randn(3, 5)
    torch.testing.assert_close(torch.compile(function, backend=backend)(x), function(x))


def test_results_do_not_share_memory_that_eagers_do_not() -> None:
    """Two results of equal computations have separate memory, as in eager torch. If gradients are
    requested the results may share memory, because torch.compile itself merges the computations.
    """

    def function(x: Any) -> Any:
        return torch.exp(x).t(), torch.exp(x)[0], torch.exp(x), torch.exp(x)

    x = torch.randn(3, 5, requires_grad=True)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got = torch.compile(function, backend=backend)(x)
        before = [t.detach().clone() for t in got[1:]]
        with torch.no_grad():
            got[0].detach().fill_(7.0)
        for now, then in zip(got[1:], before, strict=True):
            torch.testing.assert_close(now.detach(), then)


def test_memory_of_any_strides() -> None:
    for strides, order in (
        ((20, 5, 1), (0, 1, 2)),
        ((1, 6, 2), (1, 2, 0)),
        ((1, 0, 1), None),
        ((40, 5, 1), None),
    ):
        shape = (3, 4, 5) if strides[0] != 1 or strides[1] == 0 else (2, 5, 3)
        assert memory_of(shape, strides).order == order, strides
    wide = laid_out(torch.arange(4.0).expand(3, 4).contiguous(), (0, 2))
    assert wide.stride() == (0, 2) and torch.equal(wide, torch.arange(4.0).expand(3, 4))


class Halves(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, -1, 4).sum(0)


def test_sizes_that_lie_within_a_dimension_are_not_padded() -> None:
    """A size is not padded if the padding would lie between two parts of the result, whose elements
    would then be in other places than eager torch's.
    """

    def joined(x: Any) -> Any:
        return (x * 2).reshape(-1, 4)

    compiled = torch.compile(joined, backend=backend)
    rows = torch.export.Dim("rows", min=2, max=64)
    kernel = ark.from_torch(Halves(), (torch.randn(8, 4),), dynamic_shapes=({0: 2 * rows},))
    for size in (5, 6, 3):
        x = torch.randn(2, size, 4)
        torch._dynamo.mark_dynamic(x, 1)
        torch.testing.assert_close(compiled(x), joined(x))
        flat = x.reshape(-1, 4)
        torch.testing.assert_close(kernel(flat), Halves()(flat))


def test_rows_that_are_joined_and_divided_again_are_padded() -> None:
    """A layer on the joined rows of several batches, (batches * rows, columns), is padded and
    divided again.
    """
    layer = torch.nn.Linear(4, 3).requires_grad_(False)
    compiled = torch.compile(layer, backend=backend)
    before = set(PROGRAMS)
    for size in (5, 6, 7, 8):
        x = torch.randn(2, size, 4)
        torch._dynamo.mark_dynamic(x, 1)
        got = compiled(x)
        torch.testing.assert_close(got, layer(x))
        assert got.stride() == layer(x).stride()
    assert len(set(PROGRAMS) - before) == 1
