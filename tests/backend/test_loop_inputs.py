"""A running loop kernel reads what Python writes between runs, also on devices whose caches keep
old values as long as they may (the emulator's stale mode).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from ark_rocm.device import Device

import ark
from ark.runtime import session
from tests.slow import slow

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

N, STEPS = 4096, 6


@pytest.fixture(params=["gfx942", pytest.param("gfx90a", marks=slow), "gfx1100"])
def old_values(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this test its own devices; otherwise a process opens each device once."""
    monkeypatch.setattr(session._state, "devices", {})
    with emulator.emulated(str(request.param), stale=1):
        ark.init(backend="rocm")
        yield
        ark.init(backend="cpu")
        ark.Model.reset()


def wrong_sums(
    make: Callable[[ark.Tensor], ark.Tensor] = lambda t: t, seen: list[bool] | None = None
) -> int:
    """Runs a sum of two tensors many times. Returns how many results were wrong. The first tensor
    is written before each run.

    make: computes the second tensor from the first. seen: receives, after each write, True if the
    kernel was still running.
    """
    changing, other = make(ark.tensor([N])), ark.tensor([N])
    total = ark.add(changing, other)
    wrong = 0
    with ark.Runtime() as runtime:
        runtime.launch()
        other.from_numpy(np.arange(N))
        for step in range(STEPS):
            changing.from_numpy(np.full(N, step * 3.0))
            if seen is not None:
                seen.append(runtime.running())
            runtime.run()
            wrong += int((total.to_numpy() != np.arange(N) + step * 3.0).sum())
    return wrong


@pytest.mark.usefixtures("old_values")
def test_inputs_reach_the_running_kernel() -> None:
    running: list[bool] = []
    assert wrong_sums(seen=running) == 0
    assert running == [True] * STEPS


@pytest.mark.usefixtures("old_values")
def test_writing_a_parameter_restarts_the_loop() -> None:
    running: list[bool] = []
    assert wrong_sums(ark.Parameter, running) == 0
    assert running == [True] + [False] * (STEPS - 1)


@pytest.mark.usefixtures("old_values")
def test_inputs_in_cached_memory_are_read_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control for the tests above: if inputs are in plain memory, the emulator's kernel reads old
    values.
    """
    monkeypatch.delattr(Device, "fed")
    assert wrong_sums() > 0
