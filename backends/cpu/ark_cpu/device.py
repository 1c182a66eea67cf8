"""The CPU as a device. Its memory is this process's memory. A launch starts one thread, which
starts a thread for each further processor (ark_cpu.workers).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from importlib import resources
from pathlib import Path
from weakref import WeakSet

import numpy as np

from ark.backend.devices import Binary, Copies, Grid, Memory, MemoryKind
from ark.errors import SystemError
from ark_cpu import machines, workers
from ark_cpu.memory import available_bytes, memory_bytes

# The amount of free memory is read once per this number of allocated bytes, because reading it
# takes half a millisecond, longer than a small allocation.
_READ_EVERY_BYTES = 1 << 20

_LOOK = ctypes.CFUNCTYPE(None)
_NO_LOOK = _LOOK()  # no callback for a kernel that waits


def _check_started(result: int) -> None:
    if result != 0:
        raise SystemError(
            "the system refused to start a thread per processor; plan for fewer processors "
            "(--machine cpu-N) or raise the limit on threads"
        )


class CpuLaunch:
    """A launch of a loop kernel on separate threads."""

    def __init__(self, library: ctypes.CDLL, params: bytes, processors: int) -> None:
        self._params = ctypes.create_string_buffer(params, len(params))
        self._result = 0
        self._elapsed = 0.0
        # This event, not Thread.join, tells when the kernel's thread has ended: after a signal,
        # join can report a running thread as ended.
        self._ended = threading.Event()
        workers.run(partial(self._run, library, processors), self._ended.set)

    def _run(self, library: ctypes.CDLL, processors: int) -> None:
        start = time.perf_counter()
        self._result = library.ark_loop(self._params, processors, _NO_LOOK)
        self._elapsed = time.perf_counter() - start

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        self._ended.wait(timeout_s)
        if self.done():
            _check_started(self._result)
        return self.done()

    def elapsed_ms(self) -> float:
        return self._elapsed * 1e3


def _nothing() -> None:
    pass


class CpuInlineLaunch:
    """See InlineDevice.inline."""

    def __init__(self, library: ctypes.CDLL, params: np.ndarray, processors: int) -> None:
        self._loop, self._processors = library.ark_loop, processors
        self._params, self._address = params, params.ctypes.data
        self._runner = 0
        self._elapsed = 0.0
        self._ended = threading.Event()
        self._ended.set()
        self._check = self._leave = _nothing
        self._error: BaseException | None = None
        # `_looking` is a generator, because Python also raises a signal's exception at the start of
        # a function. In a generator this point is inside the `try`. So no exception is raised in
        # the frames of the kernel, where it would be lost.
        looking = self._looking()
        next(looking)
        self._look = _LOOK(partial(next, looking))

    def __call__(self, check: Callable[[], None], leave: Callable[[], None]) -> None:
        self._check, self._leave, self._error = check, leave, None
        self._runner = threading.get_ident()
        self._ended.clear()
        start = time.perf_counter()
        try:
            result = self._loop(self._address, self._processors, self._look)
        finally:
            self._elapsed = time.perf_counter() - start
            self._ended.set()
            self._check = self._leave = _nothing
        if self._error is not None:
            raise self._error
        _check_started(result)

    def _looking(self) -> Generator[None, None, None]:
        while True:
            try:
                while True:
                    yield
                    if self._error is None:
                        self._check()
            except GeneratorExit:
                return
            except BaseException as error:
                self._error = error
                self._leave()

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the kernel has ended or the time is up, and returns done(). A call on the
        thread that runs the kernel (from `check` or a signal handler) does not wait, because the
        kernel cannot go on before the call returns.
        """
        if self._runner != threading.get_ident():
            self._ended.wait(timeout_s)
        return self.done()

    def elapsed_ms(self) -> float:
        return self._elapsed * 1e3


class CpuDevice:
    """The host's cores as one device."""

    def __init__(self, index: int) -> None:
        if index != 0:
            raise SystemError(f"CPU device {index} does not exist; the only one is 0")
        self.machine = machines.model(machines.cores(), memory_bytes())
        self.arch = self.machine.arch
        self.dlpack = (1, 0)
        self._maps: dict[int, tuple[mmap.mmap, int | None]] = {}
        self._libraries: dict[int, int | None] = {}
        self._launches: WeakSet[CpuLaunch] = WeakSet()
        self._unread = 0

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        size = max(nbytes, mmap.PAGESIZE)
        self._check_free(size)
        try:
            handle = self._shared_file(size) if kind == "symmetric" else None
            mapping = _private(size) if handle is None else mmap.mmap(handle, size)
        except (OSError, ValueError, OverflowError) as error:
            raise SystemError(
                f"{size / 1e6:.0f} MB of memory could not be mapped: {error}"
            ) from error
        return self._memory(mapping, handle, nbytes, kind, owned=True)

    def _check_free(self, size: int) -> None:
        self._unread += size
        if self._unread < _READ_EVERY_BYTES:
            return
        self._unread = 0
        free = available_bytes()
        if free and size > free:
            raise SystemError(
                f"{size / 1e6:.0f} MB of memory are needed, but only {free / 1e6:.0f} MB are "
                "free; use a smaller model or context, or free memory"
            )

    def _shared_file(self, size: int) -> int:
        """Opens an unnamed file, so that no file is left when the process ends."""
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("ark-symmetric")
        else:
            handle, path = tempfile.mkstemp(prefix="ark-symmetric")
            Path(path).unlink()
        os.ftruncate(handle, size)
        return handle

    def _memory(
        self, mapping: mmap.mmap, handle: int | None, nbytes: int, kind: MemoryKind, owned: bool
    ) -> Memory:
        view = np.frombuffer(mapping, np.uint8)
        address = view.ctypes.data
        self._maps[address] = (mapping, handle)
        return Memory(address, nbytes, kind, view[:nbytes], owned)

    def free(self, memory: Memory) -> None:
        _, handle = self._maps.pop(memory.address, (None, None))
        if handle is not None:
            os.close(handle)

    def write(self, address: int, data: np.ndarray) -> None:
        flat = np.ascontiguousarray(data)
        ctypes.memmove(address, flat.ctypes.data, flat.nbytes)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        ctypes.memmove(out.ctypes.data, address, nbytes)
        return out

    def zero(self, address: int, nbytes: int) -> None:
        ctypes.memset(address, 0, nbytes)

    def load(self, binary: Binary) -> ctypes.CDLL:
        try:
            library, handle = self._open(binary)
        except OSError as error:
            raise SystemError(
                f"the compiled loop kernel could not be loaded: {error}; if the folder for "
                "temporary files is full or not executable, set TMPDIR to another one"
            ) from error
        self._libraries[library._handle] = handle
        library.ark_loop.restype = ctypes.c_int
        library.ark_loop.argtypes = [ctypes.c_void_p, ctypes.c_int, _LOOK]
        return library

    def _open(self, binary: Binary) -> tuple[ctypes.CDLL, int | None]:
        """Loads a library from a file in memory (memfd) if the system supports it, so that a full
        disk does not matter. Otherwise loads it from a temporary file.

        The file stays open as long as the library is loaded, because the loader identifies the
        library by the file's name.
        """
        if hasattr(os, "memfd_create"):
            handle = os.memfd_create("ark-loop")
            try:
                with os.fdopen(os.dup(handle), "wb") as out:
                    out.write(binary.data)
                return ctypes.CDLL(_fresh_name(handle)), handle
            except OSError:
                os.close(handle)
        with tempfile.TemporaryDirectory(prefix="ark-") as folder:
            path = Path(folder, f"loop{binary.suffix}")
            path.write_bytes(binary.data)
            return ctypes.CDLL(str(path)), None

    def unload(self, program: object) -> None:
        assert isinstance(program, ctypes.CDLL)
        handle = self._libraries.pop(program._handle)
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(program._handle))
        if handle is not None:
            os.close(handle)

    def launch(
        self, program: object, params: bytes, grid: Grid, stream: int | None = None
    ) -> CpuLaunch:
        assert isinstance(program, ctypes.CDLL)
        launch = CpuLaunch(program, params, grid.processors)
        self._launches.add(launch)
        return launch

    def inline(self, program: object, params: np.ndarray, grid: Grid) -> CpuInlineLaunch:
        assert isinstance(program, ctypes.CDLL)
        return CpuInlineLaunch(program, params, grid.processors)

    def copies(self) -> Copies:
        return Copies(resources.files("ark_cpu").joinpath("copies.h").read_text())

    def export(self, memory: Memory) -> bytes:
        _, handle = self._maps[memory.address]
        if handle is None:
            raise SystemError("only symmetric memory can be given to other processes")
        return f"{os.getpid()}:{handle}:{memory.nbytes}".encode()

    def map_peer(self, handle: bytes) -> Memory:
        try:
            pid, descriptor, nbytes = (int(v) for v in handle.decode().split(":"))
            opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
            mapping = mmap.mmap(opened, max(nbytes, mmap.PAGESIZE))
        except (OSError, ValueError) as error:
            raise SystemError(
                f"the peer's memory cannot be mapped ({error}); CPU ranks must run on one machine, "
                "as one user"
            ) from error
        return self._memory(mapping, opened, nbytes, "symmetric", owned=False)

    def free_bytes(self) -> int:
        return available_bytes()

    def close(self) -> None:
        if not all(launch.done() for launch in self._launches):
            return
        for _, handle in self._maps.values():
            if handle is not None:
                os.close(handle)
        self._maps.clear()


def _private(size: int) -> mmap.mmap:
    """Allocates private memory of this process, in huge pages if the system has them. With small
    pages, ops that walk down the columns of a large matrix would touch more pages than the TLB
    holds.
    """
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a system without huge pages
            mapping.madvise(advice)
    return mapping


def _fresh_name(handle: int) -> str:
    """Returns the name of an open file from which no library has been loaded yet.

    The dynamic loader identifies libraries by file name: for a name that it has loaded before, it
    returns the earlier library, whatever the file contains now. It also keeps some libraries after
    they were closed.
    """
    system = ctypes.CDLL(None)
    system.dlopen.restype = ctypes.c_void_p
    name = f"/proc/self/fd/{handle}"
    while loaded := system.dlopen(name.encode(), os.RTLD_NOW | os.RTLD_NOLOAD):
        system.dlclose(ctypes.c_void_p(loaded))
        name = name.replace("/fd/", "/fd/./", 1)
    return name
