"""An rmsnorm that is written with plain ops becomes one op that rounds where the plain ops round:
its results on the CPU have the same bits as torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

import ark
from ark.backend import registry
from ark.frontend.tensor import Tensor
from ark.lower.prepare import prepare

torch = pytest.importorskip("torch")

SIZES = [4, 16, 64]


def rows(x: Tensor, scale: float | None = None) -> Tensor:
    """Returns the rows, normalised in fp32."""
    c = ark.cast(x, ark.fp32)
    squares = ark.mul(c, c)
    mean = ark.reduce_mean(squares, 2 if scale is None else 1)
    return ark.mul(c, ark.rsqrt(ark.add(mean, 1e-5 if scale is None else scale)))


def as_llama(x: Tensor, w: Tensor) -> Tensor:
    return ark.mul(w, ark.cast(rows(x), x.dtype()))


def of_squares(x: Tensor, w: Tensor, other: Tensor) -> Tensor:
    """Returns x normalised by the squares of `other`. x and `other` are cast by separate ops."""
    c = ark.cast(other, ark.fp32)
    factor = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(c, c), 2), 1e-5))
    return ark.mul(w, ark.cast(ark.mul(ark.cast(x, ark.fp32), factor), x.dtype()))


def as_t5(x: Tensor, w: Tensor) -> Tensor:
    return of_squares(x, w, x)


def by_other_rows(x: Tensor, w: Tensor) -> Tensor:
    return of_squares(x, w, ark.relu(x))


def as_gemma(x: Tensor, w: Tensor) -> Tensor:
    return ark.cast(ark.mul(rows(x), ark.add(ark.cast(w, ark.fp32), 1.0)), x.dtype())


def plain(x: Tensor, w: Tensor) -> Tensor:
    return ark.mul(rows(x), w)


def over_columns(x: Tensor, w: Tensor) -> Tensor:
    return ark.mul(w, ark.cast(rows(x, 1e-5), x.dtype()))


def factors_of_columns(x: Tensor, w: Tensor) -> Tensor:
    c = ark.reshape(ark.cast(x, ark.fp32), [64, 64])
    factors = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(c, c), 1), 1e-5))
    return ark.mul(w, ark.cast(ark.mul(c, ark.reshape(factors, [1, 64])), x.dtype()))


def rounded_to_another_type(x: Tensor, w: Tensor) -> Tensor:
    return ark.mul(w, ark.cast(ark.cast(rows(x), ark.fp16), x.dtype()))


def read_twice(x: Tensor, w: Tensor) -> Tensor:
    normed = ark.cast(rows(x), x.dtype())
    return ark.add(ark.mul(w, normed), normed)


def twin(build: Callable[..., Tensor], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns the same norm in torch."""
    c = x.float()
    y = c * torch.rsqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5)
    return (y * (w.float() + 1.0)).to(x.dtype) if build is as_gemma else w * y.to(x.dtype)


def kinds(build: Callable[..., Tensor], dtype: ark.DataType) -> list[str]:
    """Returns the types of the nodes that the program is rewritten to."""
    model = ark.Model()
    with ark.use_model(model):
        ark.copy(build(ark.tensor(SIZES, dtype), ark.parameter([SIZES[-1]], dtype)))
    graph = prepare(model.graph, registry.machine("h200")).graph
    return [n.type for n in graph.nodes if not n.virtual]


@pytest.mark.parametrize("build", [as_llama, as_t5, as_gemma])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_norm_is_one_and_equals_torchs(build: Callable[..., Tensor], dtype: str) -> None:
    """A norm of plain ops becomes one op and equals torch's. The rows contain integers, so that
    sums of squares are exact in any order.
    """
    ark.init(backend="cpu")
    kind = getattr(ark, dtype)
    wanted = "rmsnorm" if build is as_gemma else "rounded_rmsnorm"
    assert kinds(build, kind).count(wanted) == 1
    assert "reduce_mean" not in kinds(build, kind)
    generator = torch.Generator().manual_seed(1)
    host = torch.bfloat16 if dtype == "bf16" else torch.float16
    x = torch.randint(-9, 10, SIZES, generator=generator).to(host)
    w = torch.randn(SIZES[-1:], generator=generator).to(host)
    result = build(ark.Tensor.from_torch(x), ark.Tensor.from_torch(w)).eval()
    assert torch.equal(torch.as_tensor(result), twin(build, x, w))


@pytest.mark.parametrize(
    "build",
    [over_columns, factors_of_columns, rounded_to_another_type, read_twice, by_other_rows],
)
def test_other_forms_stay_as_they_are(build: Callable[..., Tensor]) -> None:
    assert not {"rmsnorm", "rounded_rmsnorm"} & set(kinds(build, ark.bf16))


def test_fp32_has_nothing_to_round() -> None:
    assert kinds(plain, ark.fp32).count("rmsnorm") == 1
