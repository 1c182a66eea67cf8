"""Objects that four threads call concurrently, closed objects, and kernels for many sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from onnx import TensorProto, helper

import ark
from ark.interop import kernels
from ark.interop.kernels import Kernels
from ark.interop.onnx.model import OnnxModel, from_proto

torch = pytest.importorskip("torch")
from ark.interop.torch.program import PROGRAMS  # noqa: E402


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


def _by_four(call: Callable[[int], None]) -> None:
    """Calls a function with 0 to 3, each in its own thread. Raises the first error of any."""
    errors: list[BaseException] = []
    start = threading.Barrier(4)

    def run(number: int) -> None:
        try:
            start.wait()
            call(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _network(op: str = "Neg") -> OnnxModel:
    info = helper.make_tensor_value_info
    shape = ("rows", 64)
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["m"]), helper.make_node("Add", ["m", "x2"], ["y"])],
        "graph",
        [info("x", TensorProto.FLOAT, shape), info("x2", TensorProto.FLOAT, shape)],
        [info("y", TensorProto.FLOAT, shape)],
    )
    opset = [helper.make_opsetid("", 17)]
    return from_proto(helper.make_model(graph, opset_imports=opset, ir_version=8))


def test_onnx_model_that_four_threads_call() -> None:
    """Four threads call one ONNX model with two sizes, from the first call on."""
    model = _network()

    def call(number: int) -> None:
        for turn in range(150):
            x = np.full((1 + (number + turn) % 2, 64), 10.0 * number + turn, np.float32)
            (y,) = model(x, 3 * x)
            np.testing.assert_array_equal(y, 2 * x)

    _by_four(call)
    assert len(model._kernels) == 2
    model.close()


def test_onnx_models_of_their_own_in_four_threads() -> None:
    models = [_network(op) for op in ("Neg", "Abs", "Relu", "Neg")]
    wanted = (2.0, 4.0, 4.0, 2.0)

    def call(number: int) -> None:
        x = np.ones((1, 64), np.float32)
        for _ in range(20):
            np.testing.assert_array_equal(models[number](x, 3 * x)[0], wanted[number] * x)

    _by_four(call)


def test_calls_of_closed_kernels_are_refused() -> None:
    model, x = _network(), np.ones((1, 64), np.float32)
    model(x, x)
    model.close()
    model.close()
    with pytest.raises(ark.InvalidUsageError, match=r"was closed; load it again"):
        model(x, x)
    executor = ark.inference_model(torch.nn.ReLU())
    executor(torch.ones(2))
    executor.close()
    with pytest.raises(ark.InvalidUsageError, match="was closed"):
        executor(torch.ones(2))
    total = ark.add(ark.tensor([4]), 1.0)
    with ark.Runtime() as runtime:
        runtime.launch()
        runtime.run()
    assert total.to_numpy()[0] == 1.0
    with pytest.raises(ark.InvalidUsageError, match="no plan is launched"):
        runtime.run()


@pytest.mark.parametrize("loop_mode", [False, True])
def test_runtime_that_four_threads_run(loop_mode: bool) -> None:
    count = ark.tensor([1], ark.int32)
    ark.add(count, 1, output=count)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=loop_mode)
        _by_four(lambda number: [runtime.run(1 + number) for _ in range(25)] and None)
        assert int(count.to_numpy()[0]) == 25 * (1 + 2 + 3 + 4)
    ark.Model.reset()


class Loss(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * 1.0 + 0.0 * x.sum()).sum()


def test_training_by_four_threads_is_as_many_steps() -> None:
    loss = Loss()
    momentum = torch.optim.SGD(loss.parameters(), 1.0, momentum=1.0)
    trained = ark.training_model(loss, None, momentum)
    _by_four(lambda _: [trained(torch.ones(1)) for _ in range(3)])  # type: ignore[func-returns-value]
    assert float(loss.weight.detach()) == -sum(range(1, 13))  # one momentum for all
    trained.close()


class Flipped(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(0) * 2.0


def test_sizes_that_four_threads_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads call a module with more sizes than kernels are cached. Kernels that are evicted
    complete their calls.
    """
    monkeypatch.setattr(kernels, "MAX_KERNELS", 2)
    size = torch.export.Dim("size", min=2, max=64)
    kernel = ark.from_torch(Flipped(), (torch.ones(9),), dynamic_shapes=({0: size},))
    before = set(PROGRAMS)

    def call(number: int) -> None:
        for turn in range(12):
            x = torch.arange(float(3 + (number + turn) % 4))
            torch.testing.assert_close(kernel(x), x.flip(0) * 2.0)

    _by_four(call)
    loaded = [p for p in set(PROGRAMS) - before if p._executor is not None]
    assert 0 < len(loaded) <= 2 + 4  # an evicted kernel in use is loaded again


def test_last_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many kernels are cached, the least recently used one is evicted and its
    memory freed.
    """
    monkeypatch.setattr(kernels, "MAX_KERNELS", 2)
    ended: list[str] = []
    kept: Kernels[str] = Kernels(ended.append)
    for name in ("a", "b", "a", "c", "b"):
        assert kept.get(name, lambda name=name: name) == name  # type: ignore[misc]
    assert ended == ["b", "a"] and len(kept) == 2
    kept.close()
    assert sorted(ended) == ["a", "b", "b", "c"]
    model = _network()
    for rows in (1, 2, 1, 3, 4, 1):
        x = np.full((rows, 64), float(rows), np.float32)
        np.testing.assert_array_equal(model(x, x)[0], 0 * x)
        assert len(model._kernels) <= 2
    model.close()
