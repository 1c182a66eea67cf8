"""Torch modules on rows, lookups and vectors: results compared with torch's, and the number
of ops.
"""

from __future__ import annotations

from typing import Any

import pytest

import ark

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional


class Whole(nn.Module):  # type: ignore[misc, name-defined]
    """Wraps a function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any) -> Any:
        return self.function(*given)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch.manual_seed(0)


def same(function: Any, *given: Any, rtol: float = 2e-5) -> list[str]:
    """Compares a function's result with torch's. Returns the kinds of ark's tasks."""
    module = function if isinstance(function, nn.Module) else Whole(function)
    with torch.no_grad():
        result, want = ark.from_torch(module, given), module(*given)
        torch.testing.assert_close(result(*given), want, rtol=rtol, atol=rtol)
    return [op.kind for op in result._program._plan.ops]


def rows(*shape: int, dtype: Any = torch.float32) -> Any:
    return (torch.rand(shape) * 4 - 1).to(dtype)


@pytest.mark.parametrize("columns", [8, 33, 768, 5000])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm_is_one_pass(columns: int, bias: bool) -> None:
    norm = nn.LayerNorm(columns, bias=bias)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, -2, 2)
    assert same(norm, rows(6, columns)) == ["row_norm"]
    assert same(norm, rows(2, 3, columns)) == ["row_norm"]


def test_layer_norm_with_another_reader_is_written() -> None:
    """If another op also reads the normalised rows of a layer norm before the weight is applied,
    these rows are stored. A weight of as many elements as there are rows is not the norm's weight.
    """
    x, w, table = rows(5, 16), rows(16), rows(5, 16)

    def normed_and_plain(t: Any, u: Any) -> Any:
        plain = functional.layer_norm(t, (16,))
        return plain * u + 1.0, plain

    module = Whole(normed_and_plain)
    for got, want in zip(ark.from_torch(module, (x, w))(x, w), normed_and_plain(x, w), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    same(lambda t, u: functional.layer_norm(t, (16,)) * u, x, table)
    same(lambda t, u: functional.layer_norm(t, (16,)) * u + t, x, w)
    same(lambda t, u: u - functional.layer_norm(t, (16,)), x, w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_one_pass(dtype: Any) -> None:
    x, w = rows(5, 96, dtype=dtype), rows(96, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    kinds = same(lambda t, u: functional.rms_norm(t, (96,), u, 1e-6), x, w, rtol=tolerance)
    assert kinds == ["row_norm"]
    same(lambda t: functional.rms_norm(t, (96,)), x, rtol=tolerance)


def test_norms_over_the_batch_and_over_places() -> None:
    x = rows(3, 5, 7, 6)
    instance = nn.InstanceNorm2d(5, affine=True)
    nn.init.uniform_(instance.weight)
    nn.init.uniform_(instance.bias)
    same(instance, x)
    same(lambda t, w, b: functional.batch_norm(t, None, None, w, b, True), x, rows(5), rows(5))
    same(lambda t: functional.batch_norm(t, None, None, None, None, True), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_dimensions_that_are_no_neighbours(dtype: Any) -> None:
    """A sum over two dimensions that are not neighbours becomes two sums, with an intermediate
    result in fp32.
    """
    x = rows(9, 5, 40, dtype=dtype)
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    for reduce in (torch.sum, torch.mean, torch.amax):
        kinds = same(lambda t, reduce=reduce: reduce(t, dim=(0, 2)), x, rtol=tolerance)
        assert kinds == ["reduce", "reduce"]


def test_many_rows_of_a_table() -> None:
    table, at = rows(70, 24), torch.randint(0, 70, (5, 61))
    assert same(lambda i, t: functional.embedding(i, t), at, table) == ["gather"]
    for bad in (70, -1):  # embeddings do not count from the end
        result = ark.from_torch(Whole(lambda i, t: functional.embedding(i, t)), (at, table))
        with pytest.raises(ark.GpuError, match=f"index {bad}, which is out of range"):
            result(torch.full_like(at, bad), table)


def test_dimensions_of_one_change_places_for_nothing() -> None:
    x, heads = rows(40, 64), rows(2, 9, 3, 8)
    assert "transpose" not in same(lambda a, b: torch.einsum("bi,bj->bij", a, b), x, x)
    kinds = same(lambda a, b: torch.einsum("bqhd,bkhd->bhqk", a, b), heads, heads)
    assert kinds.count("transpose") <= 3
    assert same(lambda a: a.view(40, 1, 64).permute(0, 2, 1) * 2.0, x) == ["elementwise"]


def test_expand_to_the_same_shape_is_not_a_copy() -> None:
    x, at = rows(40, 64), torch.randint(0, 64, (40, 3))
    kinds = same(lambda a, i: torch.take_along_dim(a, i, 1), x, at)
    assert kinds.count("gather") == 1 and len(kinds) == 2  # indices count from the end
    assert same(lambda a: a.expand(1, -1, 64) * 2.0, x) == ["elementwise"]
    same(lambda a: a[:1].expand(40, 64), x)


def test_largest_without_their_places() -> None:
    assert same(lambda t: t.topk(3).values, rows(4, 50)) == ["topk"]
    same(lambda t: t.topk(3, largest=False).indices, rows(4, 50))


def _counted(t: Any) -> Any:
    return (t > 0.5).sum(1)


def test_logsumexp_reduces_twice() -> None:
    """logsumexp becomes two reductions, and an op between them that makes the subtracted largest
    value finite.
    """
    kinds = same(lambda t: t.logsumexp(0), rows(7, 1030))
    assert kinds.count("reduce") == 2 and len(kinds) == 4


def variance_of_rows(t: Any, _: Any) -> Any:
    return t.var(1)


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (variance_of_rows, ["reduce", "reduce", "elementwise"]),
        (lambda t, u: t.var(0), ["reduce", "reduce", "elementwise"]),
        (lambda t, u: t.norm(dim=1), ["reduce", "elementwise"]),
        (lambda t, u: t.norm(dim=0), ["reduce", "elementwise"]),
        (lambda t, u: (t * u).sum(1), ["reduce"]),
        (lambda t, u: (t * u).sum(0), ["reduce"]),
        (lambda t, u: ((t - u) ** 2).mean(), ["reduce"]),
        (lambda t, u: _counted(t), ["reduce"]),
        (lambda t, u: (t > 0.5).all(0), ["reduce", "elementwise"]),
        (lambda t, u: torch.dot(t.reshape(-1), u.reshape(-1)), ["reduce"]),
        (lambda t, u: (t * u[:, :1]).amax(1), ["reduce"]),
        (lambda t, u: (t * u[:1]).amax(0), ["reduce"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_reductions_are_not_written(function: Any, kinds: list[str], dtype: Any) -> None:
    shape, tolerance = ((7, 1030), 1e-4) if dtype == torch.float32 else ((600, 9), 3e-2)
    x, y = rows(*shape, dtype=dtype), rows(*shape, dtype=dtype)
    if function is variance_of_rows and dtype == torch.float32:
        kinds = ["row_fusion"]
    assert same(function, x, y, rtol=tolerance) == kinds


def test_terms_of_reductions_with_other_readers_are_written() -> None:
    """The terms of a reduction are stored if another op reads them too, or if no body computes them
    in the reduction.
    """
    x, row = rows(6, 70), rows(70)

    def sums_and_squares(t: Any) -> Any:
        squares = t * t
        return squares.sum(1), squares

    for got, want in zip(
        ark.from_torch(Whole(sums_and_squares), (x,))(x), sums_and_squares(x), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert same(lambda t, u: (t * u).sum(1), x, row, rtol=1e-4) == ["elementwise", "reduce"]
    same(lambda t: (t * torch.arange(70)).sum(1), x, rtol=1e-4)
    same(lambda t, u: (t + t.T).sum(1), x[:, :6].contiguous(), row, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_over_any_dimension(function: Any, dtype: Any) -> None:
    """Softmax over any dimension equals torch's. If the dimension's elements are not contiguous,
    nothing is transposed.
    """
    tolerance = 2e-5 if dtype == torch.float32 else 1e-2
    x = rows(3, 7, 5, 6, dtype=dtype) * 8
    for dim in (0, 2):
        kinds = same(lambda t, dim=dim: function(t, dim), x, rtol=tolerance)
        assert "transpose" not in kinds and kinds.count("reduce") == 2
    assert same(lambda t: function(t, 1), x[:, :, :1, :1].contiguous(), rtol=tolerance) == [
        "row_norm"
    ]


def test_few_long_rows_are_shared() -> None:
    x = rows(2, 40000)
    assert "row_norm" not in same(lambda t: torch.softmax(t, 1), x)
    assert "topk" in same(lambda t: t.topk(9), x)
    same(lambda t: t.topk(9).values, torch.full((2, 40000), 0.25))  # all are equal
    ties = torch.randint(0, 5, (2, 40000)).float()
    kinds = same(lambda t: (t.topk(9).values, t.topk(3, largest=False).values), ties)
    assert kinds.count("topk") == 3
    line = torch.randint(-9, 9, (1 << 19,))
    assert same(lambda t: t.cumsum(0), line).count("scan") == 2
    assert same(lambda t: t.cumsum(0), line.float()).count("scan") == 2
    few = torch.randint(-9, 9, (3, 1 << 18)).float()
    assert same(lambda t: t.cumsum(1), few).count("scan") == 2
    same(lambda t: t.float().cumsum(0), rows(4, 70))


def test_places_of_equal_elements() -> None:
    """argmax, argmin and max return the first of equal elements, also if a row is divided among
    processors. The first op reduces numbers that contain both the value and its index, the second
    op extracts the index.
    """
    line = torch.zeros(1 << 19)
    line[[5, 70, 1 << 18, (1 << 19) - 1]] = 3.0
    assert same(lambda t: t.argmax(), line) == ["reduce", "elementwise"]
    assert same(lambda t: t.argmin(), -line) == ["reduce", "elementwise"]
    table = torch.randint(0, 3, (40, 50)).float()
    for dim in (0, 1):
        assert same(lambda t, dim=dim: t.argmin(dim), table) == ["reduce", "elementwise"]
    assert same(lambda t: t.argmax(1), torch.randint(0, 3, (4, 50, 6)).float())[0] == "reduce"
    assert same(lambda t: t.max(0).indices, table) == ["reduce", "elementwise"]


def test_sums_of_transposed_matrices_read_the_originals() -> None:
    """A sum of a transposed matrix reads the original, if the remaining dimensions keep their
    order. Otherwise the transpose remains.
    """
    x = torch.randn(3, 40, 50)
    assert same(lambda t: t.transpose(1, 2).sum(1), x) == ["reduce"]
    assert same(lambda t: t.transpose(1, 2).amax(2, keepdim=True), x) == ["reduce"]
    assert same(lambda t: t.permute(2, 0, 1).mean(0), x) == ["reduce"]
    assert "transpose" in same(lambda t: t.permute(2, 1, 0).sum(1), x)
