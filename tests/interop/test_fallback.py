"""torch.compile falls back to torch where ark fails, with one line that states the reason."""

from __future__ import annotations

from typing import Any

import pytest

import ark
from ark.errors import GpuError

torch = pytest.importorskip("torch")
from torch import fx  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.interop.torch import backend, compile, program  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")
    torch._dynamo.reset()


def _function(x: Any) -> Any:
    return torch.relu(x) * 2.0 + 1.0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("error", [ark.PlanError("no plan fits"), AssertionError("a rule broke")])
def test_graph_that_cannot_be_compiled(
    error: Exception, dynamic: bool, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(program, "Planning", fail)
    compiled = torch.compile(_function, backend=backend, dynamic=dynamic)
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), _function(x))
    errors = capsys.readouterr().err
    assert errors.count("runs in torch, because ark failed") == 1 and str(error) in errors


@pytest.mark.parametrize("grad", [False, True])
def test_kernel_that_cannot_be_loaded(
    grad: bool, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """If ark cannot load a kernel at its first call, torch runs the graph; also a
    backward graph.
    """

    def fail(*_: Any, **__: Any) -> Any:
        raise ark.SystemError("a compiler is missing")

    monkeypatch.setattr(program, "load", fail)
    compiled = torch.compile(_function, backend=backend)
    mine, theirs = (torch.ones(3, 4).requires_grad_(grad) for _ in range(2))
    torch.testing.assert_close(compiled(mine), _function(theirs))
    if grad:
        compiled(mine).sum().backward()
        _function(theirs).sum().backward()
        torch.testing.assert_close(mine.grad, theirs.grad)
    assert capsys.readouterr().err.count("a compiler is missing") == 1 + grad


def test_device_that_fails_is_not_hidden(monkeypatch: Any) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise GpuError("a wait ran out of its budget")

    monkeypatch.setattr(program, "load", fail)
    with pytest.raises(GpuError, match="ran out of its budget"):
        torch.compile(_function, backend=backend)(torch.ones(3))


class Indexed(torch.nn.Module):
    """A module that indexes a parameter by a constant that is created on the CPU during tracing, as
    Swin transformers do with relative positions.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.tensor([2, 0, 1]).to(x.device)
        return x[index] * torch.tensor(2.0)


def test_which_nodes_stay_in_torch_by_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes whose tensors are on other devices than ark's are left to torch, except constants of
    the graph and tensors without dimensions. The graph is written by hand, because no GPU is
    present.
    """
    monkeypatch.setattr(compile, "torch_device", lambda: torch.device("meta"))
    graph, there = fx.Graph(), torch.device("meta")
    graph.owning_module = torch.nn.Module()
    graph.owning_module.register_buffer("index", torch.ones(3))
    graph.owning_module.register_buffer("scalar", torch.tensor(2.0))

    def node(value: Any, target: Any, *given: Any) -> Any:
        result = target if isinstance(target, fx.Node) else graph.call_function(target, given)
        result.meta["val"] = value
        return result

    aten = torch.ops.aten
    x = node(torch.empty(3, 4, device=there), graph.placeholder("x"))
    number, near = (node(torch.ones(n), graph.placeholder("a")) for n in ((), (3,)))
    constant = node(torch.ones(3), graph.get_attr("index"))
    scalar = node(torch.tensor(2.0), graph.get_attr("scalar"))
    copied = node(torch.tensor(2.0), aten.lift_fresh_copy.default, scalar)
    taken = (
        copied,
        node(torch.empty(3, 4, device=there), aten.fill.Tensor, x, copied),
        node(torch.empty(3, device=there), aten._to_copy.default, constant),
        node(torch.empty(3, 4, device=there), aten.mul.Tensor, x, number),
    )
    stay = (
        node(torch.ones(3), aten.mul.Tensor, near, number),
        node(torch.empty(3, device=there), aten._to_copy.default, near),
        node(torch.ones(3), aten.mul.Tensor, constant, number),
        node(torch.ones(3), aten.lift_fresh_copy.default, constant),
    )
    assert [compile._elsewhere(n) for n in taken] == [None] * 4
    why = "a tensor is on cpu, but ark runs on meta"
    assert [compile._elsewhere(n) for n in stay] == [why] * 4


def test_constant_of_the_graph_and_a_number_that_is_a_tensor() -> None:
    module, x = Indexed(), torch.randn(3, 4)
    for got in (torch.compile(module, backend=backend)(x), ark.from_torch(module, (x,))(x)):
        torch.testing.assert_close(got, module(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no GPU here")
def test_constants_of_the_cpu_in_graphs_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    ark.init(backend="cuda")
    module, x = Indexed(), torch.randn(3, 4, device="cuda")
    number = torch.tensor(3.0)
    for got in (torch.compile(module, backend=backend)(x), ark.from_torch(module, (x,))(x)):
        torch.testing.assert_close(got, module(x))
    product = torch.compile(lambda x, y: x * y + 1.0, backend=backend)
    torch.testing.assert_close(product(x, number), x * 3.0 + 1.0)
    assert "ark failed" not in capsys.readouterr().err


def test_graph_is_left_as_it_is_by_the_partitioner() -> None:
    """The partitioner does not change its graph, because torch runs it if ark fails later."""
    traced = make_fx(lambda x: torch.sort(x * 2.0)[0] + 1.0, tracing_mode="fake")(torch.ones(2, 3))
    before = str(traced.graph)
    compiled = compile.compile_graph(traced, [torch.ones(2, 3)])
    assert str(traced.graph) == before and isinstance(compiled, fx.GraphModule)
