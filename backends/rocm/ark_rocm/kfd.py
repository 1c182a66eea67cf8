"""Creates queues of an SDMA engine through the Linux driver's public interface (linux/kfd_ioctl.h).

HIP has no function that creates such queues. The driver (/dev/kfd) creates the queue in the address
space that HIP has set up for this process, so the engine can access the same memory as kernels,
including peers' memory. The ring, its pointers and the doorbell are mapped for the GPU; the host
does not access them. Called by ark_rocm.queues. This code was compared with the driver's header but
has not been run, because ark is developed without an AMD GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ark.errors import SystemError

DEVICE = "/dev/kfd"
NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PAGE_BYTES = 4096
DOORBELLS = 2 * PAGE_BYTES  # bytes of a process's doorbells on one GPU, from GFX9 on
# The types of queues that are tried, in this order: queues of the SDMA engines for links between
# GPUs, then queues of the SDMA engines for the link to the host.
QUEUE_TYPES = (3, 1)
GTT, DOORBELL = 1 << 1, 1 << 3
WRITABLE, EXECUTABLE, NO_SUBSTITUTE = 1 << 31, 1 << 30, 1 << 28
COHERENT, UNCACHED = 1 << 26, 1 << 25
_LIBC = ctypes.CDLL(None, use_errno=True)


def _struct(name: str, *members: tuple[str, type]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(members)})


_U32, _U64 = ctypes.c_uint32, ctypes.c_uint64
CREATE_QUEUE = _struct(
    "kfd_ioctl_create_queue_args",
    ("ring_base_address", _U64),
    ("write_pointer_address", _U64),
    ("read_pointer_address", _U64),
    ("doorbell_offset", _U64),
    ("ring_size", _U32),
    ("gpu_id", _U32),
    ("queue_type", _U32),
    ("queue_percentage", _U32),
    ("queue_priority", _U32),
    ("queue_id", _U32),
    ("eop_buffer_address", _U64),
    ("eop_buffer_size", _U64),
    ("ctx_save_restore_address", _U64),
    ("ctx_save_restore_size", _U32),
    ("ctl_stack_size", _U32),
)
DESTROY_QUEUE = _struct("kfd_ioctl_destroy_queue_args", ("queue_id", _U32), ("pad", _U32))
ALLOC = _struct(
    "kfd_ioctl_alloc_memory_of_gpu_args",
    ("va_addr", _U64),
    ("size", _U64),
    ("handle", _U64),
    ("mmap_offset", _U64),
    ("gpu_id", _U32),
    ("flags", _U32),
)
FREE = _struct("kfd_ioctl_free_memory_of_gpu_args", ("handle", _U64))
_OF_GPUS = (("handle", _U64), ("device_ids_array_ptr", _U64), ("n_devices", _U32))
MAP = _struct("kfd_ioctl_map_memory_to_gpu_args", *_OF_GPUS, ("n_success", _U32))
UNMAP = _struct("kfd_ioctl_unmap_memory_from_gpu_args", *_OF_GPUS, ("n_success", _U32))
# For each ioctl of the driver: the direction of its data (1: to the driver, 3: both ways) and the
# ioctl's number.
CALLS: dict[type[ctypes.Structure], tuple[int, int]] = {
    CREATE_QUEUE: (3, 0x02),
    DESTROY_QUEUE: (3, 0x03),
    ALLOC: (3, 0x16),
    FREE: (1, 0x17),
    MAP: (3, 0x18),
    UNMAP: (3, 0x19),
}


def request(kind: type[ctypes.Structure]) -> int:
    """The ioctl's request code, computed as the macros _IOW and _IOWR of linux/ioctl.h do."""
    direction, number = CALLS[kind]
    return direction << 30 | ctypes.sizeof(kind) << 16 | ord("K") << 8 | number


def gpu_id(location: tuple[int, int, int], nodes: Path = NODES) -> int:
    """The driver's number of the GPU at a PCI address (domain, bus, device). Raises SystemError if
    there is not exactly one GPU at the address: a partitioned GPU has several nodes at one address.
    """
    domain, bus, device = location
    matching = []
    for node in sorted(nodes.glob("*")):
        with contextlib.suppress(OSError, ValueError):
            words = dict(
                line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines()
            )
            at = int(words.get("domain", 0)), int(words["location_id"]) & ~7
            number = int((node / "gpu_id").read_text())
            if number and at == (domain, bus << 8 | device << 3):
                matching.append(number)
    if len(matching) != 1:
        raise SystemError(
            f"expected one GPU at PCI address {domain:04x}:{bus:02x}:{device:02x} in {nodes}, "
            f"found {len(matching)}"
        )
    return matching[0]


Ioctl = Callable[[int, ctypes.Structure], object]


@dataclass
class KfdQueue:
    """A queue of an SDMA engine, with its memory. ioctl: a function that calls the driver and
    raises OSError if the driver refuses.
    """

    ioctl: Ioctl
    gpu: int
    ring: int = 0
    write_pointer: int = 0
    doorbell: int = 0
    _number: int | None = None
    _mapped: list[tuple[int, int, int]] = field(default_factory=list)  # handle, address, bytes

    @classmethod
    def create(cls, ioctl: Ioctl, gpu: int, ring_bytes: int) -> KfdQueue:
        """A queue whose ring has the given number of bytes, a power of two and at least a page.
        Raises OSError if the driver refuses it.
        """
        queue = cls(ioctl, gpu)
        try:
            memory = GTT | COHERENT | UNCACHED | WRITABLE | EXECUTABLE | NO_SUBSTITUTE
            queue.ring = queue._map(ring_bytes, memory)
            pointers = queue._map(PAGE_BYTES, memory)
            doorbells = queue._map(DOORBELLS, DOORBELL | COHERENT | WRITABLE | NO_SUBSTITUTE)
            queue.write_pointer = pointers + 64
            queue.doorbell = doorbells + queue._start(ring_bytes, pointers)
        except BaseException:
            queue.destroy()
            raise
        return queue

    def _map(self, nbytes: int, flags: int) -> int:
        """Allocates zeroed memory at addresses that the process does not use otherwise."""
        address = _reserve(nbytes)
        got = ALLOC(va_addr=address, size=nbytes, gpu_id=self.gpu, flags=flags)
        try:
            self.ioctl(request(ALLOC), got)
        except BaseException:
            _release(address, nbytes)
            raise
        self._mapped.append((got.handle, address, nbytes))
        self._on_gpu(MAP, got.handle)
        return address

    def _on_gpu(self, kind: type[ctypes.Structure], handle: int) -> None:
        gpus = (_U32 * 1)(self.gpu)
        at = ctypes.addressof(gpus)
        self.ioctl(request(kind), kind(handle=handle, device_ids_array_ptr=at, n_devices=1))

    def _start(self, ring_bytes: int, pointers: int) -> int:
        """Creates the queue. Returns the offset of its doorbell among the process's doorbells."""
        refused: OSError | None = None
        for kind in QUEUE_TYPES:
            asked = CREATE_QUEUE(
                ring_base_address=self.ring,
                ring_size=ring_bytes,
                read_pointer_address=pointers,
                write_pointer_address=self.write_pointer,
                gpu_id=self.gpu,
                queue_type=kind,
                queue_percentage=100,
                queue_priority=7,
            )
            try:
                self.ioctl(request(CREATE_QUEUE), asked)
            except OSError as error:
                refused = error
                continue
            self._number = asked.queue_id
            return int(asked.doorbell_offset % DOORBELLS)
        assert refused is not None
        raise refused

    def destroy(self) -> None:
        """Frees everything; safe to call twice."""
        number, self._number = self._number, None
        if number is not None:
            with contextlib.suppress(OSError):
                self.ioctl(request(DESTROY_QUEUE), DESTROY_QUEUE(queue_id=number))
        mapped, self._mapped = self._mapped, []
        for handle, address, nbytes in reversed(mapped):
            with contextlib.suppress(OSError):
                self._on_gpu(UNMAP, handle)
            with contextlib.suppress(OSError):
                self.ioctl(request(FREE), FREE(handle=handle))
            _release(address, nbytes)


def _reserve(nbytes: int) -> int:
    """Reserves unused addresses without allocating memory for them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    _LIBC.mmap.restype = ctypes.c_void_p
    _LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    address = _LIBC.mmap(None, nbytes, 0, flags, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "no addresses")
    return int(address)


def _release(address: int, nbytes: int) -> None:
    _LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def open_driver() -> int:
    """A file descriptor of the driver. Raises SystemError if /dev/kfd cannot be opened."""
    try:
        return os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise SystemError(f"{DEVICE} cannot be opened ({error.strerror})") from error


def driver_ioctl(descriptor: int) -> Ioctl:
    """A function that sends ioctls to the driver through `descriptor`."""

    def ask(number: int, data: ctypes.Structure) -> object:
        return fcntl.ioctl(descriptor, number, data)

    return ask
