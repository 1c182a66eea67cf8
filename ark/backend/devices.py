"""What an opened device must offer, and what some devices offer besides.

Every device satisfies `Device`: it has memory. Those whose processors share it satisfy
`KernelDevice`. What only some hardware can do is a protocol of its own (`StreamDevice`,
`QueuedDevice`, ...), which the runtime asks for by isinstance. Everything here is vendor-neutral.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from ark.codegen.dialect import BoxMap
from ark.machine import Machine

MemoryKind = Literal["device", "host", "symmetric"]


@dataclass(frozen=True)
class Binary:
    """A compiled loop kernel; `suffix` is the file name ending that fits `data`."""

    data: bytes
    suffix: str
    log: str = ""


@dataclass(frozen=True)
class Memory:
    """A device allocation. `address` is valid on the device; `host` is a uint8 view or None."""

    address: int
    nbytes: int
    kind: MemoryKind
    host: np.ndarray | None = None
    owned: bool = True


class Launch(Protocol):
    """A running loop kernel."""

    def done(self) -> bool:
        """True once the kernel has left the device."""
        ...

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the kernel has ended or the time is up; returns done().

        Raises ark.errors.GpuError if the device reports a fault.
        """
        ...

    def elapsed_ms(self) -> float:
        """Milliseconds on the device, measured by the device's own events where it has them."""
        ...


@runtime_checkable
class BoxMapper(Protocol):
    """A device whose bodies have box maps."""

    def box_map(self, box: BoxMap, address: int) -> bytes:
        """The hardware's form of a map of memory at `address`, layout.MAP_BYTES long.

        Raises SystemError where the hardware cannot map that memory, with what it wants.
        """
        ...


@dataclass(frozen=True)
class Grid:
    """The blocks of a launch: one per processor, each with so many threads and so many bytes of
    shared memory beside what its code declares.
    """

    processors: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Copies:
    """How the host's proxy copies a device's memory. header: C++ text of a class `Copies`, made of
    the other two (ark/runtime/proxy/module.cpp uses it). library: the driver's, by path or name.
    """

    header: str
    library: str = ""
    index: int = 0


@runtime_checkable
class ProxiedDevice(Protocol):
    """A device whose memory the host's proxy can copy while a kernel runs."""

    def copies(self) -> Copies: ...


@dataclass(frozen=True)
class Queue:
    """A copy engine's queue that a kernel may write, as addresses valid on the device. ring:
    requests of the size that the vendor's device code says; write_pointer, doorbell: 64-bit words.
    handle: what the vendor gives it back by.
    """

    ring: int
    write_pointer: int
    doorbell: int
    handle: object


class Device(Protocol):
    """An opened device: what the host can address of it.

    dlpack: (device type, index) as DLPack numbers them, by which torch and others find the memory.
    """

    machine: Machine
    arch: str
    dlpack: tuple[int, int]

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        """Allocates zeroed memory, 256-byte aligned.

        `host` is memory that device and host both map, coherent while a kernel runs. `symmetric`
        is device memory that `export` can give to other ranks' processes. Raises SystemError with
        the sizes (asked, free) when there is too little.
        """
        ...

    def free(self, memory: Memory) -> None:
        """Gives memory back, at once or when the kernels that run have ended; never waits."""
        ...

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies a contiguous host array to device memory; returns when the array may change."""
        ...

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copies device memory into a new uint8 array."""
        ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def free_bytes(self) -> int:
        """Device memory free now, in bytes."""
        ...

    def close(self) -> None:
        """Lets the device go. Freeing memory or dropping a launch afterwards does nothing.

        A device on which a launch is still running stays as it is: nothing is freed under a kernel.
        """
        ...


@runtime_checkable
class QueuedDevice(Device, Protocol):
    """A device whose copy engines take requests from queues that its kernels write."""

    def open_queue(self, slots: int) -> Queue:
        """A new, empty queue with room for so many requests, a power of two. SystemError with the
        reason where none can be made.
        """
        ...

    def close_queue(self, queue: Queue) -> None:
        """Gives a queue back; no kernel that writes it may be running."""
        ...


@runtime_checkable
class FedDevice(Protocol):
    """A device that promises a running kernel to see what the host writes to memory of the kind
    `fed`, but not what it writes to `device` memory, of which caches may hold old values.
    """

    fed: MemoryKind


@runtime_checkable
class KernelDevice(Device, Protocol):
    """A device that runs loop kernels: its processors, and peers, share memory."""

    def load(self, binary: Binary) -> object:
        """Loads a compiled loop kernel; the result goes to `launch` and, in the end, `unload`."""
        ...

    def unload(self, program: object) -> None:
        """Gives back what `load` took; none of its launches may be running."""
        ...

    def launch(
        self, program: object, params: bytes, grid: Grid, stream: int | None = None
    ) -> Launch:
        """Starts the loop kernel, all blocks resident; does not wait.

        stream: a caller's queue of the device, as the vendor numbers it; devices without such take
        none. `params` is the ArkParams structure of ark.codegen.layout. Raises SystemError if the
        blocks cannot all be resident.
        """
        ...

    def export(self, memory: Memory) -> bytes:
        """A handle with which another process on this host can map `symmetric` memory."""
        ...

    def map_peer(self, handle: bytes) -> Memory:
        """Maps a peer's exported memory; raises SystemError if the peer cannot be reached."""
        ...


class Again(Launch, Protocol):
    """Launches of one kernel that follow each other, asked about together: the last one's end."""

    def __call__(self, stream: int) -> None:
        """Launches with the parameters as they are now, behind the launch before."""
        ...


@runtime_checkable
class StreamDevice(KernelDevice, Protocol):
    """A device whose launches go to queues of the caller's, many a second."""

    def again(self, program: object, params: np.ndarray, grid: Grid) -> Again:
        """Launches to come, of a kernel that was launched so before. params: the ArkParams that
        each takes, in memory that stays.
        """
        ...


class InlineLaunch(Launch, Protocol):
    """Launches of one kernel, one behind the other, each on its caller's thread; as a `Launch` the
    latest of them.
    """

    def __call__(self, check: Callable[[], None], leave: Callable[[], None]) -> None:
        """Runs the kernel with the parameters as they are now, and returns when it has ended.

        check: called now and then while the kernel waits. What it raises, or a signal's exception,
        is raised here, after `leave` has told the kernel to leave and it has left.
        """
        ...


@runtime_checkable
class InlineDevice(KernelDevice, Protocol):
    """A device whose processors are threads of this process: a caller's own may be one of them."""

    def inline(self, program: object, params: np.ndarray, grid: Grid) -> InlineLaunch:
        """Launches to come. params: the ArkParams that each takes, in memory that stays."""
        ...


@runtime_checkable
class GraphDevice(KernelDevice, Protocol):
    """A device that can capture launches of a caller's stream as a graph and replay it."""

    def recording(self) -> AbstractContextManager[None]:
        """Memory may be allocated and copied, beside what is captured, while this is open."""
        ...

    def record(
        self,
        program: object,
        params: bytes,
        grid: Grid,
        stream: int,
        cleared: Sequence[tuple[int, int]],
    ) -> None:
        """Adds a launch to the graph that is being captured on the stream; before it these ranges
        (address, bytes) are set to zero. The rest as `launch`.
        """
        ...
