"""Tensors and arrays whose memory cannot be read as their values, such as torch's conjugate views
and arrays of the other byte order, or that have no memory, such as meta tensors. Each function of
ark that accepts tensors gives the results of torch and NumPy, or an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import ark
from ark.frontend import foreign
from ark.interop.onnx.model import from_proto

torch = pytest.importorskip("torch")
from torch._subclasses import FakeTensorMode  # noqa: E402

from ark.distributed.arrays import wrap  # noqa: E402
from ark.interop.torch import backend, look  # noqa: E402

ROWS, COLUMNS = 3, 4


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()


def _plain(x: Any) -> Any:
    return x


def _imaginary(x: Any) -> Any:
    """Returns the imaginary part of a conjugate tensor. It is strided and has torch's negative bit
    set.
    """
    return torch.complex(x, x + 1).conj().imag


# Functions that return a tensor of their argument's shape, mostly one with a flag (conjugate or
# negative) or unusual strides.
VIEWS: tuple[Callable[[Any], Any], ...] = (
    _plain,
    _imaginary,
    lambda x: x._neg_view(),
    lambda x: x.t().contiguous().t(),
    lambda x: torch.stack([x, x + 1], -1)[..., 1],
    lambda x: x[:1].expand(ROWS, COLUMNS),
    lambda x: torch.cat([x, x])[1 : 1 + ROWS],
    lambda x: x.flip(0)._neg_view(),
)


class Affine(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0 + 1.0


def _base(seed: int = 0) -> Any:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["native", "without a compiler"])
def test_views_of_any_flags_and_strides(kind: str) -> None:
    """Random sequences of views through both torch front ends, and one kernel that is called with
    several of them, give torch's results.
    """
    with pytest.MonkeyPatch.context() as patch:
        if kind != "native":
            patch.setattr(look, "_module", lambda: None)
        module = Affine()
        kernel = ark.from_torch(module, (_base(),))
        compiled = torch.compile(module, backend=backend)

        @settings(max_examples=30, deadline=None, derandomize=True)
        @given(st.lists(st.lists(st.sampled_from(VIEWS), max_size=3), min_size=1, max_size=4))
        def check(calls: list[list[Callable[[Any], Any]]]) -> None:
            for seed, views in enumerate(calls):
                x = _base(seed)
                for view in views:
                    x = view(x)
                torch.testing.assert_close(kernel(x), module(x))
                torch.testing.assert_close(compiled(x), module(x))

        check()


def test_parameter_that_becomes_a_negative_view() -> None:
    """A parameter that becomes a negative view at the same address gives torch's results, and so do
    parameters and constants that are such views from the beginning.
    """
    module = torch.nn.Linear(4, 3).requires_grad_(False)
    module.bias = torch.nn.Parameter(torch.randn(3)._neg_view(), requires_grad=False)
    compiled, x = torch.compile(module, backend=backend), torch.randn(2, 4)
    result = ark.from_torch(module, (x,))
    for _ in range(2):
        torch.testing.assert_close(compiled(x), module(x))
        torch.testing.assert_close(result(x), module(x))
    module.weight.data = module.weight.data._neg_view()
    torch.testing.assert_close(compiled(x), module(x))
    with pytest.raises(ark.InvalidUsageError, match=r"negative views now; call ark\.from_torch"):
        result(x)
    torch.testing.assert_close(ark.from_torch(module, (x,))(x), module(x))


def _resized() -> Any:
    """Returns a tensor whose storage has released its memory, as in sharded training."""
    x = torch.ones(ROWS, COLUMNS)
    x.untyped_storage().resize_(0)
    return x


def _shortened() -> Any:
    x = torch.ones(ROWS, COLUMNS)
    x.untyped_storage().resize_(16)
    return x


def _fake() -> Any:
    with FakeTensorMode():
        return torch.ones(ROWS, COLUMNS)


class Own(torch.Tensor):
    """A tensor subclass that computes its values itself."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


NO_MEMORY: dict[str, tuple[Callable[[], Any], str]] = {
    "no storage": (_resized, "needs 48 bytes of storage, but its storage has 0"),
    "short storage": (_shortened, "needs 48 bytes of storage, but its storage has 16"),
    "fake": (_fake, "of the class FakeTensor"),
    "subclass": (lambda: _base().as_subclass(Own), "of the class Own"),
    "sparse": (lambda: _base().to_sparse(), r"call to_dense\(\)"),
    "mkldnn": (lambda: _base().to_mkldnn(), r"call to_dense\(\)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["native", "without a compiler"])
def test_tensors_without_memory_of_their_own(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory of their own, through every way into ark, give torch's results or an
    error. A kernel that is called with such a tensor was called with a valid one before.
    """
    if kind != "native":
        monkeypatch.setattr(look, "_module", lambda: None)
    kernel = ark.from_torch(Affine(), (_base(),))
    into = ark.placeholder([ROWS, COLUMNS], ark.fp32)
    ways: tuple[Callable[[Any], Any], ...] = (
        kernel,
        ark.Tensor.from_torch,
        into.bind,
        foreign.torch_to_numpy,
        wrap,
    )
    for make, message in NO_MEMORY.values():
        kernel(_base())
        for way in ways:
            with pytest.raises(ark.InvalidUsageError, match=message):
                way(make())
    with pytest.raises(ark.InvalidUsageError, match="has no memory"):
        torch.func.vmap(ark.Tensor.from_torch)(torch.ones(2, 3))


def test_memory_that_is_shared_holds_the_values() -> None:
    """ark shares torch's memory only if its bytes are the values in order: negative and transposed
    views are refused. A copy into ark's memory has the values of any view.
    """
    x = _base()
    first = ark.Tensor.from_torch(x)
    for view, message in ((x._neg_view(), "negative"), (x.t(), "contiguous")):
        for way in (ark.Tensor.from_torch, ark.Tensor.from_dlpack, ark.relu, first.bind, wrap):
            with pytest.raises(ark.InvalidUsageError, match=message):
                way(view)
    into = ark.tensor([ROWS, COLUMNS], ark.fp32)
    total = ark.add(into, 0.0)
    with ark.Runtime() as runtime:
        runtime.launch()
        for values in (x._neg_view(), _imaginary(x), x.numpy().astype(">f4")):
            into.from_numpy(values)
            runtime.run()
            np.testing.assert_array_equal(total.to_numpy(), foreign.as_array(values))


def test_arrays_of_another_byte_order_and_masked_ones() -> None:
    x = np.arange(6, dtype=">f4")
    with pytest.raises(ark.InvalidUsageError, match=r"byte order of another machine"):
        ark.distributed.all_reduce(x)
    with pytest.raises(ark.InvalidUsageError, match=r"byte order of another machine"):
        ark.distributed.all_reduce(x.astype(np.float32), out=x)
    masked = np.ma.array([1.0, 2.0], mask=[0, 1], dtype=np.float32)
    into = ark.tensor([2], ark.fp32)
    for way in (ark.distributed.all_reduce, into.from_numpy, foreign.as_array):
        with pytest.raises(ark.InvalidUsageError, match="has a mask"):
            way(masked)
    fixed = np.ones(6, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ark.InvalidUsageError, match="read-only"):
        ark.distributed.all_reduce(x.astype(np.float32), out=fixed)
    np.testing.assert_array_equal(ark.distributed.all_reduce(fixed), fixed)


def test_autograd_sees_the_writes_of_collectives() -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    loss = (weight * x).sum()
    before = x._version
    wrap(x).read_from(wrap(torch.zeros(3)).address)
    assert x._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_sees_the_writes_of_training() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Flatten(0))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x).square().mean()

    loss, x = Loss(), torch.randn(2, 3, requires_grad=True)
    before = module(x).sum()  # keeps the weight for the gradient of x
    optimizer = torch.optim.SGD(loss.parameters(), 0.1)
    trained = ark.training_model(loss, None, optimizer)
    trained(x.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    trained.close()


def test_onnx_takes_torch_tensors_with_flags() -> None:
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["y"])],
        "graph",
        [info("x", TensorProto.FLOAT, (ROWS, COLUMNS))],
        [info("y", TensorProto.FLOAT, (ROWS, COLUMNS))],
    )
    opset = [helper.make_opsetid("", 17)]
    model = from_proto(helper.make_model(graph, opset_imports=opset, ir_version=8))
    x = _imaginary(_base())
    np.testing.assert_array_equal(model(x)[0], (-x).resolve_neg().numpy())
    with pytest.raises(ark.InvalidUsageError, match="the array is >f4"):
        model(_base().numpy().astype(">f4"))
    model.close()
