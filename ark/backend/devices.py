"""Protocols of an opened device.

Every device satisfies `Device`: it has memory. Devices whose processors share memory satisfy
`KernelDevice`. Abilities that only some hardware has are separate protocols (`StreamDevice`,
`QueuedDevice`, ...), which the runtime checks by isinstance. Everything here is vendor-neutral.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from ark.backend.codegen.body import BoxMap
from ark.machine import Machine

MemoryKind = Literal["device", "host", "symmetric"]


@dataclass(frozen=True)
class Binary:
    """A compiled loop kernel. `suffix` is the ending of the file name under which `data` is
    stored.
    """

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
        """The kernel's run time in milliseconds, measured by the device's own events where it has
        them.
        """
        ...


@runtime_checkable
class BoxMapper(Protocol):
    """A device with hardware descriptors of boxes in memory (tensor maps)."""

    def box_map(self, box: BoxMap, address: int) -> bytes:
        """The hardware's descriptor of the box at `address`, layout.MAP_BYTES long.

        Raises SystemError with the hardware's requirement if no such descriptor of that memory is
        possible.
        """
        ...


@dataclass(frozen=True)
class Grid:
    """The size of a launch: the number of blocks (one per processor), and for each block the number
    of threads and the bytes of dynamic shared memory.
    """

    processors: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class Copies:
    """The code with which the host's proxy copies a device's memory. header: C++ source of a class
    `Copies`, which ark/runtime/proxy/module.cpp constructs from the other two fields. library: the
    driver's library, by path or name.
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
    """A queue of a copy engine that kernels may write. All addresses are valid on the device. ring:
    the address of the ring of requests; the vendor's device code defines the size of a request.
    write_pointer, doorbell: addresses of 64-bit words. handle: the vendor's handle for freeing the
    queue.
    """

    ring: int
    write_pointer: int
    doorbell: int
    handle: object


class Device(Protocol):
    """An opened device: the part that the host can address.

    dlpack: (device type, index) in DLPack's numbering, by which torch and other libraries find the
    memory.
    """

    machine: Machine
    arch: str
    dlpack: tuple[int, int]

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        """Allocates zeroed memory, 256-byte aligned.

        kind: `host` is memory that device and host both map, coherent while a kernel runs;
        `symmetric` is device memory that `export` can give to other ranks' processes. Raises
        SystemError with the requested and the free size if too little is free.
        """
        ...

    def free(self, memory: Memory) -> None:
        """Frees memory, at once or after running kernels have ended; never waits."""
        ...

    def write(self, address: int, data: np.ndarray) -> None:
        """Copies a contiguous host array to device memory; the array may change after the
        return.
        """
        ...

    def read(self, address: int, nbytes: int) -> np.ndarray:
        """Copies device memory into a new uint8 array."""
        ...

    def zero(self, address: int, nbytes: int) -> None: ...

    def free_bytes(self) -> int:
        """Device memory free now, in bytes."""
        ...

    def close(self) -> None:
        """Releases the device. Freeing memory or dropping a launch afterwards does nothing.

        If a launch is still running, the device stays open, because the kernel uses its memory.
        """
        ...


@runtime_checkable
class QueuedDevice(Device, Protocol):
    """A device whose copy engines take requests from queues that its kernels write."""

    def open_queue(self, slots: int) -> Queue:
        """A new, empty queue with a number of slots that is a power of two. Raises SystemError with
        the reason if none can be made.
        """
        ...

    def close_queue(self, queue: Queue) -> None:
        """Frees a queue; no kernel that writes it may be running."""
        ...


@runtime_checkable
class FedDevice(Protocol):
    """A device on which a running kernel sees the host's writes only in memory of the kind `fed`.
    In memory of the kind `device`, a running kernel may read old values from the device's caches.
    """

    fed: MemoryKind


@runtime_checkable
class KernelDevice(Device, Protocol):
    """A device that runs loop kernels. Its processors share memory, and it can map memory of peers
    (devices of other ranks).
    """

    def load(self, binary: Binary) -> object:
        """Loads a compiled loop kernel; the result is passed to `launch` and finally to
        `unload`.
        """
        ...

    def unload(self, program: object) -> None:
        """Unloads the result of `load`; none of its launches may be running."""
        ...

    def launch(
        self, program: object, params: bytes, grid: Grid, stream: int | None = None
    ) -> Launch:
        """Starts the loop kernel with all blocks resident; does not wait.

        stream: a queue of the caller, in the vendor's numbering; None for devices without streams.
        `params` is the ArkParams structure of ark.backend.codegen.layout. Raises SystemError if the
        blocks cannot all be resident.
        """
        ...

    def export(self, memory: Memory) -> bytes:
        """A handle with which another process on this host can map `symmetric` memory."""
        ...

    def map_peer(self, handle: bytes) -> Memory:
        """Maps a peer's exported memory; raises SystemError if the peer cannot be reached."""
        ...


@runtime_checkable
class OrderedDevice(KernelDevice, Protocol):
    """A device that can queue copies between launches. A copy begins after all launches that were
    queued before it have ended, and it ends before the next launch begins. The host does not wait
    for the copy.
    """

    def enqueue_write(self, address: int, data: np.ndarray) -> None:
        """Copies a contiguous host array to device memory in the order of launches; the array may
        change after the return.
        """
        ...

    def enqueue_zero(self, address: int, nbytes: int) -> None:
        """Clears device memory in the order of launches."""
        ...


class RepeatedLaunch(Launch, Protocol):
    """A kernel that is launched repeatedly with the same parameters' memory. As a `Launch`, it is
    done when the last of the launches has ended.
    """

    def __call__(self, stream: int) -> None:
        """Launches the kernel once more on a stream, with the present contents of the parameters'
        memory. The launch runs after the previous one.
        """
        ...


@runtime_checkable
class StreamDevice(KernelDevice, Protocol):
    """A device that launches a kernel on streams of the caller, at a cost low enough for many
    launches per second.
    """

    def repeated_launch(self, program: object, params: np.ndarray, grid: Grid) -> RepeatedLaunch:
        """Returns an object that launches a kernel repeatedly. The kernel must have been launched
        before. params: the ArkParams that every launch reads, in memory that stays allocated.
        """
        ...


class InlineLaunch(Launch, Protocol):
    """Launches of one kernel, one after the other. Each runs on the thread that calls this object.
    As a `Launch`, its methods refer to the latest launch.
    """

    def __call__(self, check: Callable[[], None], leave: Callable[[], None]) -> None:
        """Runs the kernel with the present parameters and returns when it has ended.

        check: called at intervals while the kernel waits. If it raises, or a signal handler does,
        `leave` is called to abort the kernel, and the exception is raised after the kernel has
        left.
        """
        ...


@runtime_checkable
class InlineDevice(KernelDevice, Protocol):
    """A device whose processors are threads of this process. The calling thread may be one of
    them.
    """

    def inline(self, program: object, params: np.ndarray, grid: Grid) -> InlineLaunch:
        """Inline launches of a program. params: the ArkParams of every launch, in memory that stays
        allocated.
        """
        ...


@runtime_checkable
class GraphDevice(KernelDevice, Protocol):
    """A device that can capture launches of a caller's stream as a graph and replay it."""

    def recording(self) -> AbstractContextManager[None]:
        """A context in which memory may be allocated and copied outside of the captured graph."""
        ...

    def record(
        self,
        program: object,
        params: bytes,
        grid: Grid,
        stream: int,
        cleared: Sequence[tuple[int, int]],
    ) -> None:
        """Adds a launch to the graph that is being captured on the stream. The graph zeroes the
        ranges `cleared`, each (address, bytes), before the launch. The other arguments are those of
        `launch`.
        """
        ...
