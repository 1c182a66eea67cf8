"""DMA queues of an emulated device: the packets, and a queue to which kernels or the host may
write.

A queue is a ring of packets in memory, a write pointer, a read pointer and a doorbell (byte counts
that only grow). Tests create queues here and pass the addresses to kernels, which write packets,
then the write pointer, then the doorbell. Packet layouts are those of SDMA 4.4 (the Linux driver's
public headers). Only the packets that ark uses are here.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

from ark.errors import InvalidUsageError
from ark_rocm_emulator.device import _library

ADD_64 = 47


def copy_linear(source: int, target: int, size: int) -> bytes:
    """A packet of 7 words that copies `size` bytes (1 to 2^30) from `source` to `target`."""
    return struct.pack("<IIIQQ", 1, size - 1, 0, source, target)


def atomic_add_64(target: int, value: int) -> bytes:
    """A packet of 8 words that adds `value` to the 64-bit word at `target`."""
    return struct.pack("<IQQQI", 10 | ADD_64 << 25, target, value & (2**64 - 1), 0, 0)


def fence(target: int, value: int) -> bytes:
    """A packet of 4 words that writes the 32-bit `value` to `target` when all earlier packets are
    complete.
    """
    return struct.pack("<IQI", 5, target, value)


def poll_at_least(source: int, value: int) -> bytes:
    """A packet of 6 words that waits until the 32-bit word at `source` is at least `value`."""
    return struct.pack("<IQIII", 8 | 5 << 28 | 1 << 31, source, value, 0xFFFFFFFF, 4)


@dataclass(frozen=True)
class SdmaQueue:
    """A queue: its number, the size of its ring in bytes, and the addresses that a kernel needs."""

    number: int
    ring_bytes: int
    ring: int
    write_pointer: int
    read_pointer: int
    doorbell: int

    @classmethod
    def create(cls, device: int = 0, ring_bytes: int = 4096) -> SdmaQueue:
        """Creates a queue of the emulated device `device`. `ring_bytes` is a multiple of 4096.

        Raises:
            InvalidUsageError: the device does not exist, or the size is not a multiple of 4096.
        """
        library, _ = _library()
        addresses = (ctypes.c_uint64 * 4)()
        number = library.ark_emulator_sdma_create(device, ctypes.c_uint64(ring_bytes), addresses)
        if number < 0:
            raise InvalidUsageError(
                f"No DMA queue of {ring_bytes} bytes can be created on device {device}. Expected "
                f"an emulated device and a multiple of 4096 bytes."
            )
        return cls(number, ring_bytes, *addresses)

    def submit(self, packets: bytes) -> None:
        """Writes packets from the host: first to the ring, then the write pointer, then the
        doorbell.
        """
        at = ctypes.c_uint64.from_address(self.write_pointer)
        for k, byte in enumerate(packets):
            ctypes.c_uint8.from_address(self.ring + (at.value + k) % self.ring_bytes).value = byte
        at.value += len(packets)
        ctypes.c_uint64.from_address(self.doorbell).value = at.value

    @property
    def executed(self) -> int:
        """The number of packets that the engine has executed."""
        library, _ = _library()
        library.ark_emulator_sdma_executed.restype = ctypes.c_uint64
        return int(library.ark_emulator_sdma_executed(self.number))

    def destroy(self) -> None:
        """Destroys the queue. Its addresses are invalid afterwards."""
        library, _ = _library()
        library.ark_emulator_sdma_destroy(self.number)
