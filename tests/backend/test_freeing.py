"""hipFree waits until no kernel runs, and a loop kernel runs until the host ends it. So ark must
not free memory while a kernel runs. The emulated devices here refuse such a free and record it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

import ark
from ark.runtime import session

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")


@pytest.fixture(params=["gfx942", "gfx1100"])
def refusing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this test its own devices; otherwise a process opens each device once."""
    monkeypatch.setattr(session._state, "devices", {})
    with emulator.emulated(str(request.param), 2, implicit_sync=0):
        ark.init(backend="rocm")
        yield
        ark.init(backend="cpu")
        ark.Model.reset()
        gc.collect()
        assert refused() == []


def refused() -> list[str]:
    kind = emulator.ErrorKind.UNDER_KERNEL
    return [failure.message for failure in emulator.failures() if failure.kind == kind]


def ran(n: int) -> ark.Tensor:
    """Returns a tensor with device memory, of a model whose runtime has ended."""
    x = ark.tensor([n])
    y = ark.add(x, 1.0)
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(np.zeros(n))
        runtime.run()
    ark.Model.reset()
    return y


@pytest.mark.usefixtures("refusing")
def test_tensor_dropped_while_a_loop_runs_is_freed_later() -> None:
    earlier = ran(256)
    x = ark.tensor([64])
    y = ark.add(x, 1.0)
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(np.zeros(64))
        runtime.run()
        assert runtime.running()
        del earlier
        gc.collect()
        assert refused() == []
        runtime.run()
        assert (y.to_numpy() == 1).all()


@pytest.mark.usefixtures("refusing")
@pytest.mark.parametrize("loop_mode", [True, False])
def test_model_dropped_while_a_loop_runs_is_freed_later(loop_mode: bool) -> None:
    x = ark.tensor([64])
    ark.add(x, 1.0)
    with pytest.raises(KeyError), ark.Runtime() as runtime:
        runtime.launch(loop_mode=loop_mode)
        x.from_numpy(np.zeros(64))
        runtime.run(3, non_blocking=True)
        raise KeyError
    assert refused() == []
