"""An opened AMD device on the emulator, through the unmodified package hip-python: memory, limits,
peers.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.device import Device

from ark.backend.codegen.dialect import Source
from ark.backend.devices import Grid
from ark.backend.protocol import Target
from ark.errors import SystemError
from ark.machine.capability import Capability

emulator = pytest.importorskip("ark_rocm_emulator")

ARCH = "gfx942"
EMPTY = (
    'extern "C" __attribute__((global, amdgpu_flat_work_group_size(64, 64))) void ark_loop() {}\n'
)


@pytest.fixture(scope="module", autouse=True)
def _emulated() -> Iterator[None]:
    with emulator.emulated(ARCH, 2):
        yield


@pytest.fixture
def device() -> Iterator[Device]:
    with contextlib.closing(backend.open(0)) as opened:
        yield opened


def test_machine_equals_the_device_report(device: Device) -> None:
    assert device.arch == device.machine.arch == ARCH
    assert device.machine.lanes == 64 and device.machine.has(Capability.MFMA)
    assert device.machine.processors > 0
    assert backend.probe().notes and "emulated" in backend.probe().notes[0]


@pytest.mark.parametrize("kind", ["device", "symmetric", "host"])
def test_memory_is_zeroed_and_keeps_written_values(device: Device, kind: Any) -> None:
    memory = device.alloc(1000, kind)
    assert memory.address % 256 == 0 and memory.nbytes == 1000
    assert not device.read(memory.address, 1000).any()
    data = np.arange(1000, dtype=np.uint8)
    device.write(memory.address, data)
    assert (device.read(memory.address, 1000) == data).all()
    assert (memory.host is not None) == (kind == "host")
    if memory.host is not None:
        assert (memory.host == data).all()
    device.zero(memory.address + 500, 500)
    assert device.read(memory.address, 1000).sum() == data[:500].sum()
    device.free(memory)


def test_too_little_memory_names_both_sizes(device: Device) -> None:
    asked = device.free_bytes() + (1 << 40)
    with pytest.raises(SystemError, match=rf"{asked} bytes of device memory .* \d+ bytes free"):
        device.alloc(asked, "device")


def test_blocks_that_cannot_all_be_resident_are_refused(device: Device) -> None:
    program = device.load(backend.compiler().compile(Source(EMPTY), Target(ARCH, 64)))
    with pytest.raises(SystemError, match="1000000 blocks, each of 64 threads"):
        device.launch(program, b"", Grid(1000000, 64, 0))
    run = device.launch(program, bytes(8), Grid(2, 64, 0))
    assert run.wait(30) and run.done() and run.elapsed_ms() >= 0


def test_device_indices_out_of_range_are_refused() -> None:
    with pytest.raises(SystemError, match="AMD GPU 7 cannot be opened: there are 2 AMD GPUs"):
        backend.open(7)


def test_peer_in_the_same_process(device: Device) -> None:
    with contextlib.closing(backend.open(1)) as other:
        memory = other.alloc(256, "symmetric")
        mapped = device.map_peer(other.export(memory))
        assert mapped.address == memory.address and not mapped.owned
        device.free(mapped)
        other.write(memory.address, np.full(256, 7, np.uint8))
        assert (other.read(memory.address, 256) == 7).all()


def test_peer_on_another_machine(device: Device) -> None:
    handle = device.export(device.alloc(256, "symmetric"))
    about = {**json.loads(handle[64:]), "host": "elsewhere"}
    with pytest.raises(SystemError, match="on the machine elsewhere"):
        device.map_peer(handle[:64] + json.dumps(about).encode())


def _write_into(handle: bytes) -> None:
    with contextlib.closing(backend.open(1)) as device:
        mapped = device.map_peer(handle)
        device.write(mapped.address + 16, np.arange(8, dtype=np.uint8))
        device.free(mapped)


def test_peer_in_another_process(device: Device) -> None:
    memory = device.alloc(256, "symmetric")
    child = multiprocessing.get_context("spawn").Process(
        target=_write_into, args=(device.export(memory),)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert device.read(memory.address, 256)[16:24].tolist() == list(range(8))
