"""`Runtime.get_runtime`, the states of a runtime, and its reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ark

State = ark.Runtime.State


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    ark.init(backend="cpu")
    yield
    ark.Runtime.get_runtime().reset()
    ark.init(backend="cpu")


def test_latest_runtime_is_shared() -> None:
    x = ark.tensor([4])
    y = ark.add(x, 1.0)
    ark.Runtime.get_runtime().launch()  # only ark holds a reference to this runtime
    x.from_numpy(np.arange(4, dtype=np.float32))
    ark.Runtime.get_runtime().run()
    np.testing.assert_array_equal(y.to_numpy(), np.arange(4) + 1)
    first = ark.Runtime.get_runtime()
    first.reset()
    latest = ark.Runtime()
    assert ark.Runtime.get_runtime() is latest is not first


def test_empty_model_is_launched_run_and_stopped() -> None:
    with ark.Runtime.get_runtime() as runtime:
        runtime.launch()
        runtime.run()
        runtime.stop()
    assert runtime.state is State.Init


@pytest.mark.parametrize("loop_mode", [True, False])
def test_runtime_reports_its_state(loop_mode: bool) -> None:
    total = ark.tensor([1 << 18])
    ark.add(total, 1.0, output=total)
    runtime = ark.Runtime()
    assert runtime.state is State.Init
    runtime.reset()  # no launch to end yet
    runtime.launch(loop_mode=loop_mode)
    assert runtime.state is State.LaunchedNotRunning
    runtime.run(2000, non_blocking=True)
    assert runtime.state is State.Running
    runtime.wait()
    assert runtime.state is State.LaunchedNotRunning
    runtime.reset()
    assert runtime.state is State.Init and not runtime.launched()
    runtime.launch(loop_mode=loop_mode)
    runtime.run(1)
    runtime.reset()


@pytest.mark.parametrize(
    "view",
    [lambda x: x, lambda x: ark.reshape(x, [6]), lambda x: x[1:2], lambda x: ark.identity(x)],
)
def test_placeholder_that_no_op_reads_has_its_memory(view: Callable[[Any], Any]) -> None:
    torch = pytest.importorskip("torch")
    data = torch.arange(6.0).reshape(2, 3)
    with ark.use_model(ark.Model()):
        y = view(ark.placeholder([2, 3], data=data))
        assert torch.equal(y.eval().flatten(), (data[1:2] if y.nelems() == 3 else data).flatten())


def test_placeholder_without_memory_is_named() -> None:
    with ark.use_model(ark.Model()):
        x = ark.placeholder([2, 3], name="x")
        with pytest.raises(ark.InvalidUsageError, match=r"'x.*' has no memory; pass .*tensor\} to"):
            x.eval()
