"""Inputs that were once accepted silently: each is now refused with a clear error or works as its
name says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.cli import main
from ark.errors import BaseError, InvalidUsageError

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ark.init(backend="cpu")
    yield
    ark.init(backend="cpu")


def launched(shape: list[int], dtype: Any = ark.fp32) -> tuple[ark.Runtime, ark.Tensor, ark.Tensor]:
    """Returns a launched runtime of a model that adds a tensor to itself, with its input and
    output.
    """
    x = ark.tensor(shape, dtype)
    y = ark.add(x, x)
    runtime = ark.Runtime()
    runtime.launch()
    return runtime, x, y


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "a device that is not there": ("one device", lambda: ark.Runtime().launch(device_id=7)),
    "a device below -1": ("device -2", lambda: ark.Runtime().launch(device_id=-2)),
    "a planner's device": ("one device", lambda: ark.Planner(7).plan()),
    "a device that is no number": ("the device", lambda: ark.Runtime().launch(device_id="0")),
    "an empty plan": ("the plan is {}", lambda: ark.Runtime().launch(plan={})),  # type: ignore
    "a plan's text": ("the plan is", lambda: ark.Runtime().launch(plan="{}")),  # type: ignore
    "a stream that is a word": ("stream='x'", lambda: ark.Runtime().launch(stream="x")),
    "a stream that is a number": ("stream=7", lambda: ark.Runtime().launch(stream=7)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_launches_with_missing_arguments_are_refused(name: str) -> None:
    words, call = REFUSED[name]
    ark.add(ark.tensor([4]), 1.0)
    with pytest.raises(InvalidUsageError, match=words):
        call()


@pytest.mark.parametrize("call", ["to_numpy", "from_numpy", "copy", "eval"])
def test_stream_is_an_object_that_can_be_waited_for(call: str) -> None:
    runtime, x, _ = launched([4])
    data = [] if call in ("to_numpy", "eval") else [np.zeros(4, np.float32)]
    with runtime, pytest.raises(InvalidUsageError, match="stream='x'"):
        getattr(x, call)(*data, stream="x")

    class Stream:
        waits = 0

        def synchronize(self) -> None:
            Stream.waits += 1

    runtime, x, _ = launched([4])
    with runtime:
        if call != "eval":
            getattr(x, call)(*data, stream=Stream())
            assert Stream.waits == 1


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (ark.int32, np.array([1 << 40, 0], np.int64)),
        (ark.int32, np.array([-(1 << 31) - 1, 0], np.int64)),
        (ark.uint8, np.array([-1, 0])),
        (ark.int8, np.array([128, 0])),
        (ark.int32, np.array([0.5, 1.0])),
        (ark.int32, np.array([np.nan, 1.0])),
        (ark.int64, np.array([1e30, 1.0])),
        (ark.int4, np.array([8, 0])),
    ],
    ids=str,
)
def test_values_that_a_type_cannot_hold_are_refused(dtype: Any, values: np.ndarray) -> None:
    x = ark.tensor([2], dtype)
    ark.cast(x, ark.fp32)
    with ark.Runtime() as runtime:
        runtime.launch()
        with pytest.raises(InvalidUsageError, match="which holds whole numbers from"):
            x.from_numpy(values)
        x.from_numpy(np.array([1, 0], np.int64))
        np.testing.assert_array_equal(x.to_numpy().astype(int), [1, 0])
        x.from_numpy(np.array([1.0, 0.0]))


@pytest.mark.parametrize(
    ("shape", "given", "fits"),
    [
        ([3, 4], (4, 3), False),
        ([3, 4], (12,), False),
        ([3, 4], (3, 4), True),
        ([3, 4], (1, 3, 4), True),
        ([1, 4], (4,), True),
    ],
)
def test_shapes_are_the_tensors(shape: list[int], given: tuple[int, ...], fits: bool) -> None:
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(given)
    runtime, x, y = launched(shape)
    with runtime:
        if fits:
            x.from_numpy(values)
            runtime.run()
            np.testing.assert_array_equal(y.to_numpy(), 2 * values.reshape(shape))
        else:
            with pytest.raises(InvalidUsageError, match="shape"):
                x.from_numpy(values)
    ark.Model.reset()
    held = ark.placeholder(shape)
    ark.add(held, 1.0)
    with ark.Runtime() as runtime:
        mapping = {held: torch.from_numpy(values)}
        if fits:
            runtime.launch(loop_mode=False, tensor_mappings=mapping)
        else:
            with pytest.raises(BaseError, match="shape"):
                runtime.launch(loop_mode=False, tensor_mappings=mapping)


@pytest.mark.parametrize("loop_mode", [True, False])
def test_reading_and_writing_wait_for_iterations_under_way(loop_mode: bool) -> None:
    """Reading a tensor waits for running iterations: the model adds ones in place, and each read
    must include all iterations that were requested before it.
    """
    total, one = ark.tensor([1 << 16]), ark.tensor([1 << 16])
    ark.add(total, one, output=total)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=loop_mode)
        one.from_numpy(np.ones(1 << 16, np.float32))
        for asked in (200, 300):
            runtime.run(200 if asked == 200 else 100, non_blocking=True)
            np.testing.assert_array_equal(total.to_numpy(), asked)
        runtime.run(200, non_blocking=True)
        one.from_numpy(np.zeros(1 << 16, np.float32))
        runtime.run(10, non_blocking=True)
        np.testing.assert_array_equal(total.to_torch().numpy(), 500)


def test_name_that_is_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    x, y = (helper.make_tensor_value_info(n, float32, ["n"]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    file, data = tmp_path / "m.onnx", tmp_path / "x.npy"
    onnx.save(model, file)
    np.save(data, np.ones(3, np.float32))
    for more in (
        ["--input", f"x={data}", "--input", f"x={data}"],
        ["--input", str(data), "--output", "y=a", "--output", "y=b"],
        ["--input", str(data), "--dim", "n=3", "--dim", "n=4"],
    ):
        assert main(["run", str(file), "--backend", "cpu", *more]) == 2
        assert "twice" in " ".join(capsys.readouterr().err.split())
