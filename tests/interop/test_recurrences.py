"""Associative scans in torch whose function is that of a linear recurrence (x = a x + b) become one
op.
"""

from __future__ import annotations

from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
from torch import fx  # noqa: E402
from torch._higher_order_ops.associative_scan import associative_scan_op  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.interop.torch.compile import compile_graph  # noqa: E402
from ark.interop.torch.program import LEFT, Program  # noqa: E402
from ark.interop.torch.recurrences import keep_recurrences  # noqa: E402

SHAPE = (2, 3, 40, 5)
SCANNED_DIM = 2


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)
    LEFT.clear()


def _linear(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    return [a * c, c * b + d]


def _reordered(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    """The function of `_linear` for pairs in the order (term, factor)."""
    return [c + a * d, d * b]


def _scanned(joining: Any, *given: Any, move: bool = True) -> fx.GraphModule:
    """Dynamo's graph of an associative scan along SCANNED_DIM, or along dimension 0."""

    def function(*tensors: Any) -> list[Any]:
        moved = [torch.permute(t, (2, 0, 1, 3)) for t in tensors] if move else list(tensors)
        results = associative_scan_op(joining, moved, ())
        return [torch.permute(t, (1, 2, 0, 3)) for t in results] if move else list(results)

    graph: fx.GraphModule = make_fx(function, tracing_mode="fake")(*given)
    return graph


def _pair(dtype: Any = torch.float32) -> tuple[Any, Any]:
    return torch.rand(SHAPE).to(dtype), torch.randn(SHAPE).to(dtype)


def _expected(factors: Any, terms: Any, dim: int) -> Any:
    total, totals = torch.zeros(()), []
    for factor, term in zip(factors.double().unbind(dim), terms.double().unbind(dim), strict=True):
        total = factor * total + term
        totals.append(total)
    return torch.stack(totals, dim)


def _only_last(graph: fx.GraphModule, place: int) -> None:
    """Removes all results of the graph except one."""
    (output,) = graph.graph.find_nodes(op="output")
    output.args = ([output.args[0][place]],)
    graph.graph.eliminate_dead_code()


def _kinds(program: Any) -> list[str]:
    assert isinstance(program, Program)
    return [op.kind for op in program._plan.ops]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_recurrence_is_one_op(dtype: Any) -> None:
    factors, terms = _pair(dtype)
    graph = _scanned(_linear, factors, terms)
    _only_last(graph, 1)
    compiled = compile_graph(graph, (factors, terms))
    assert _kinds(compiled) == ["scan"] and not LEFT
    (got,) = compiled(factors, terms)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    want = _expected(factors, terms, SCANNED_DIM).to(dtype)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("move", [True, False])
def test_factors_may_be_the_second_operand_and_be_read(move: bool) -> None:
    factors, terms = _pair()
    graph = _scanned(_reordered, terms, factors, move=move)
    compiled = compile_graph(graph, (terms, factors))
    assert _kinds(compiled).count("scan") == 2 and not LEFT
    values, products = compiled(terms, factors)
    dim = SCANNED_DIM if move else 0
    torch.testing.assert_close(values, _expected(factors, terms, dim).float())
    torch.testing.assert_close(products, factors.cumprod(dim))


@pytest.mark.parametrize(
    "joining",
    [
        lambda a, b, c, d: [a * c, c * b - d],
        lambda a, b, c, d: [a * c, a * d + b],
        lambda a, b, c, d: [a * c, c * b + 2 * d],
        lambda a, b, c, d: [a * c, c * b + c],
    ],
)
def test_other_scans_stay(joining: Any) -> None:
    graph = _scanned(joining, *_pair())
    keep_recurrences(graph)
    assert graph.graph.find_nodes(op="call_function", target=associative_scan_op)


def test_torch_computes_the_operator_equally() -> None:
    """The operator's own function, which torch calls if ark leaves the operator to it."""
    factors, terms = _pair()
    got = torch.ops.ark.recurrence(factors, terms, SCANNED_DIM)
    torch.testing.assert_close(got, _expected(factors, terms, SCANNED_DIM).float())
