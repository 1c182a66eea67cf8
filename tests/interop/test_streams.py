"""Launches on a caller's streams (ark.runtime.streams), tested without a GPU on a CPU device. The
device is not asynchronous, so the host waits for the launches in the order of the calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ark
from ark.backend.devices import StreamDevice
from ark.errors import InvalidUsageError
from ark.runtime.executor import Executor
from ark.runtime.session import backend, device
from ark.runtime.streams import Streamed

torch = pytest.importorskip("torch")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ark.interop.torch.program import Program  # noqa: E402


class InOrder:
    """A device whose launches end before the next one begins."""

    def __init__(self, device: Any, given: tuple[Any, ...]) -> None:
        self.device, self.given, self.streams = device, given, []
        self.last: Any = None

    def __call__(self, stream: int) -> None:
        self.wait()
        program, params, grid = self.given
        self.streams.append(stream)
        self.last = self.device.launch(program, params.tobytes(), grid)

    def done(self) -> bool:
        return self.last is None or self.last.done()

    def wait(self, timeout_s: float | None = None) -> bool:
        return self.last is None or self.last.wait(timeout_s)

    def elapsed_ms(self) -> float:
        return self.last.elapsed_ms()


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    ark.init(backend="cpu")
    actual = device()
    in_order = lambda self, *given: InOrder(self, given)  # noqa: E731
    monkeypatch.setattr(type(actual), "repeated_launch", in_order, raising=False)
    tensors = [torch.zeros(4, 5), torch.zeros(4, 5)]
    return Program.of(make_fx(torch.add, tracing_mode="fake")(*tensors), tensors)


def test_launches_count_on_and_tables_come_back(program: Program) -> None:
    rng = np.random.default_rng(0)
    pairs = [torch.from_numpy(rng.normal(size=(2, 4, 5)).astype(np.float32)) for _ in range(3)]
    built = [torch.empty(4, 5) for _ in range(2)]
    addresses = [(*(t.data_ptr() for t in p), m.data_ptr()) for p in pairs for m in built]
    executor = program._placed(addresses[0])
    assert isinstance(executor, Executor) and isinstance(executor.device, StreamDevice)
    streamed = Streamed(executor)
    for turn in range(4):
        for number, (pair, result) in enumerate((p, m) for p in pairs for m in built):
            result.fill_(float("nan"))
            assert program._placed(addresses[number]) is executor
            streamed(turn)
            executor.wait_idle()
            assert torch.equal(result, pair[0] + pair[1])
        if turn == 2:  # a launch of another kind in between
            executor.resume(3).wait()
    assert executor.resumed == 4 * 6 + 3
    assert len(program._tables) == 5 or len(program._tables) == 6
    assert executor.latest is not None and executor.latest.iterations_done == executor.resumed
    program.close()


def test_more_addresses_than_tables_are_kept_for(program: Program) -> None:
    """A program keeps a task table for each of the last few sets of tensor addresses. If it is
    called with more sets, the oldest table is overwritten, and later calls with that table's
    addresses get a new one.
    """
    executor, streamed = None, None
    kept = [torch.full((4, 5), float(i)) for i in range(25)]
    result = torch.empty(4, 5)
    for _ in range(2):
        for x in kept:
            executor = program._placed((x.data_ptr(), x.data_ptr(), result.data_ptr()))
            streamed = streamed or Streamed(executor)
            streamed(0)
            executor.wait_idle()
            assert torch.equal(result, 2 * x)
    program.close()


def test_device_without_streams_is_refused() -> None:
    ark.init(backend="cpu")
    tensors = [torch.zeros(3)]
    program = Program.of(make_fx(torch.neg, tracing_mode="fake")(*tensors), tensors)
    program(torch.ones(3))
    assert program._executor is not None
    with pytest.raises(InvalidUsageError, match="cannot launch on a caller's stream"):
        Streamed(program._executor)
    assert backend().name == "cpu"
