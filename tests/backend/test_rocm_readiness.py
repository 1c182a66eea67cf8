"""Requirements of the first hour on AMD hardware, tested on an emulated device: plain launches
after the occupancy check, and counters on separate cache lines (docs/first-hour-rocm.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ark_rocm import machines

import ark
from ark.backend import registry
from ark.backend.devices import Grid
from ark.cli.doctor.bench import Bench
from ark.errors import SystemError
from ark.runtime import session
from ark.runtime.executor import Executor

emulator = pytest.importorskip("ark_rocm_emulator")
hip = pytest.importorskip("hip").hip

CACHE_LINE_BYTES = 128  # a line of AMD's L2 cache


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives this test its own devices; otherwise a process opens each device once."""
    monkeypatch.setattr(session._state, "devices", {})
    with emulator.emulated("gfx942"):
        ark.init(backend="rocm")
        yield
        ark.init(backend="cpu")
        ark.Model.reset()


def run_product() -> None:
    a = ark.tensor([64, 64])
    ones = ark.exp(a)
    total = ark.exp(ark.mul(ark.matmul(ones, ones), 0.0))
    with ark.Runtime() as runtime:
        runtime.launch()
        a.from_numpy(np.zeros((64, 64)))
        runtime.run()
        assert (total.to_numpy() == 1).all()


@pytest.mark.usefixtures("emulated")
def test_launches_are_plain_ones_behind_the_occupancy_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def noting(name: str) -> Any:
        function = getattr(hip, name)

        def called(*args: Any) -> Any:
            asked.append(name)
            return function(*args)

        return called

    occupancy, plain = "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", "hipModuleLaunchKernel"
    for name in (occupancy, plain, "hipModuleLaunchCooperativeKernel"):
        monkeypatch.setattr(hip, name, noting(name))
    run_product()
    assert asked[:2] == [occupancy, plain]
    assert "hipModuleLaunchCooperativeKernel" not in asked


@pytest.mark.usefixtures("emulated")
def test_more_blocks_than_fit_are_refused() -> None:
    with Bench(registry.get("rocm"), 0) as bench:
        most = Grid(100 * bench.processors, bench.machine.threads, 65536)
        with pytest.raises(SystemError, match="can run only"):
            bench.device.launch(bench.program, b"", most)


@pytest.mark.usefixtures("emulated")
def test_counters_share_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line_of: dict[int, int] = {}
    address_of = Executor.counter_address

    def noted(self: Executor, counter: int) -> int:
        address = address_of(self, counter)
        assert address % CACHE_LINE_BYTES == 0
        line_of[counter] = address // CACHE_LINE_BYTES
        return address

    monkeypatch.setattr(Executor, "counter_address", noted)
    run_product()
    assert len(line_of) > 1 and len(set(line_of.values())) == len(line_of)


@pytest.mark.parametrize("name", machines.MODELS)
def test_machines_have_lines_of_128_bytes(name: str) -> None:
    machine = machines.machine(name, machines.MODELS[name])
    assert machine.line_bytes == CACHE_LINE_BYTES
