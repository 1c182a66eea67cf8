"""An opened NVIDIA GPU: memory, programs, launches. It uses the device's primary context, which
PyTorch uses, too.

Copies run on a separate stream, so that they can overtake a running loop kernel. The driver's free
waits for all work on the device, so memory is freed only when no launch of ark is running. Called
by ark.runtime through the backend object.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Any
from weakref import WeakSet

import numpy as np

from ark.backend.codegen.body import BoxMap
from ark.backend.devices import Binary, Copies, Grid, Memory, MemoryKind
from ark.backend.returned import Returned
from ark.errors import GpuError, SystemError
from ark.machine import Machine
from ark_cuda import boxes, machines, peer, probe
from ark_cuda.driver import check, cu, current, words
from ark_cuda.launches import CudaLaunch, Events, Program, enqueue
from ark_cuda.ordered import Ordered
from ark_cuda.repeated_launch import CudaRepeatedLaunch

_ATTRIBUTE = cu.CUdevice_attribute
_FUNCTION = cu.CUfunction_attribute


class CudaDevice:
    """Implements ark.backend.devices.Device with the driver API."""

    machine: Machine
    arch: str

    def __init__(self, index: int) -> None:
        probed = probe.probe()
        if not probed.devices:
            raise SystemError(f"{probed.reason}; {probed.remedy}")
        if index not in [d.index for d in probed.devices]:
            usable = ", ".join(f"{d.index} ({d.name})" for d in probed.devices)
            raise SystemError(
                f"NVIDIA GPU {index} does not exist or is not usable; usable GPUs: {usable}"
            )
        self._handle = check(cu.cuDeviceGet(index), f"opening GPU {index}")
        self.context = check(cu.cuDevicePrimaryCtxRetain(self._handle), f"opening GPU {index}")
        reported = self._report(index)
        self.index = index
        self.label = f"GPU {index} ({reported.name})"
        self.machine = machines.of_device(reported)
        self.arch = self.machine.arch
        self.dlpack = (2, index)
        self._peers: set[int] = set()
        self._events = Events(self.context, self.label)
        self._modules: dict[int, Any] = {}
        self._admitted: dict[tuple[int, Grid], str] = {}  # by module: all blocks can be resident
        self._launches: WeakSet[CudaLaunch] = WeakSet()
        self._returned = Returned(self._free, self._busy)
        flags = cu.CUstream_flags.CU_STREAM_NON_BLOCKING
        with current(self.context):
            self._stream = check(cu.cuStreamCreate(flags), f"opening {self.label}")
            self._copies = check(cu.cuStreamCreate(flags), f"opening {self.label}")
        self._ordered = Ordered(self.context, self._stream, self.label)

    def _attribute(self, name: str) -> int:
        attribute = getattr(_ATTRIBUTE, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cu.cuDeviceGetAttribute(attribute, self._handle), f"asking for {name}"))

    def _report(self, index: int) -> machines.Reported:
        name = check(cu.cuDeviceGetName(256, self._handle), f"opening GPU {index}")
        # Memory bandwidth = clock in kHz * bus width in bytes * two transfers per clock.
        bandwidth = (
            self._attribute("MEMORY_CLOCK_RATE")
            * self._attribute("GLOBAL_MEMORY_BUS_WIDTH")
            / 8
            * 2
            / 1e6
        )
        return machines.Reported(
            name=name.split(b"\0")[0].decode(),
            major=self._attribute("COMPUTE_CAPABILITY_MAJOR"),
            minor=self._attribute("COMPUTE_CAPABILITY_MINOR"),
            processors=self._attribute("MULTIPROCESSOR_COUNT"),
            shared_bytes=self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            memory_bytes=int(check(cu.cuDeviceTotalMem(self._handle), f"opening GPU {index}")),
            bandwidth_gbps=bandwidth,
        )

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        self._returned.settle()
        if kind == "host":
            return self._alloc_host(nbytes)
        # An IPC handle exposes whole 2 MiB pages, so symmetric memory is allocated in whole pages,
        # which it shares with no other memory.
        size = max(nbytes, 256)
        if kind == "symmetric":
            size = -(-size // peer.PAGE_BYTES) * peer.PAGE_BYTES
        with current(self.context):
            code, address = cu.cuMemAlloc(size)
            if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY and self._returned.force():
                code, address = cu.cuMemAlloc(size)
            if code == cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
                raise SystemError(self._too_little(size, kind))
            check((code,), f"allocating {size} bytes on {self.label}")
        self.zero(int(address), size)
        return Memory(int(address), nbytes, kind)

    def box_map(self, box: BoxMap, address: int) -> bytes:
        """Creates a tensor map with swizzled rows of 128 bytes. Elements outside of the matrix are
        read as zero.
        """
        with current(self.context):
            return boxes.tensor_map(box, address)

    def _too_little(self, nbytes: int, kind: str) -> str:
        total = self.machine.memory_bytes
        return (
            f"{self.label} has too little memory: {nbytes / 2**20:.1f} MiB of {kind} memory were "
            f"asked for, {self.free_bytes() / 2**20:.1f} MiB of {total / 2**20:.1f} MiB are free; "
            "use a shorter context, a smaller type or more ranks, or end what else holds memory "
            "there (`nvidia-smi` lists it)"
        )

    def _alloc_host(self, nbytes: int) -> Memory:
        size = max(nbytes, 256)
        flags = cu.CU_MEMHOSTALLOC_PORTABLE | cu.CU_MEMHOSTALLOC_DEVICEMAP
        doing = f"mapping {size} bytes of host memory for {self.label}"
        with current(self.context):
            pointer = int(check(cu.cuMemHostAlloc(size, flags), doing))
            address = int(check(cu.cuMemHostGetDevicePointer(pointer, 0), doing))
        host = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(pointer))
        host[:] = 0
        return Memory(address, nbytes, "host", host[:nbytes])

    def free(self, memory: Memory) -> None:
        if self.context is not None:
            self._returned.add(memory)

    def _free(self, memory: Memory) -> None:
        doing = f"freeing {memory.nbytes} bytes of {memory.kind} memory on {self.label}"
        with current(self.context):
            if memory.host is not None:
                check(cu.cuMemFreeHost(memory.host.ctypes.data), doing)
            elif memory.owned:
                check(cu.cuMemFree(memory.address), doing)
            elif memory.address in self._peers:
                self._peers.remove(memory.address)
                check(cu.cuIpcCloseMemHandle(memory.address), doing)

    def write(self, address: int, data: np.ndarray) -> None:
        if not data.flags["C_CONTIGUOUS"]:
            raise ValueError("write needs a C-contiguous array")
        self._copy(address, data.ctypes.data, data.nbytes)

    def read(self, address: int, nbytes: int) -> np.ndarray:
        result = np.empty(nbytes, np.uint8)
        self._copy(result.ctypes.data, address, nbytes)
        return result

    def _copy(self, to: int, source: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        doing = f"copying {nbytes} bytes on {self.label}"
        with current(self.context):
            check(cu.cuMemcpyAsync(to, source, nbytes, self._copies), doing)
            check(cu.cuStreamSynchronize(self._copies), doing)

    def zero(self, address: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        doing = f"clearing {nbytes} bytes on {self.label}"
        with current(self.context):
            check(cu.cuMemsetD8Async(address, 0, nbytes, self._copies), doing)
            check(cu.cuStreamSynchronize(self._copies), doing)

    def enqueue_write(self, address: int, data: np.ndarray) -> None:
        """See OrderedDevice.enqueue_write."""
        self._ordered.write(address, data)

    def enqueue_zero(self, address: int, nbytes: int) -> None:
        """See OrderedDevice.enqueue_zero."""
        self._ordered.zero(address, nbytes)

    def load(self, binary: Binary) -> Program:
        doing = f"loading a loop kernel on {self.label}, which runs {self.arch}"
        with current(self.context):
            module = check(cu.cuModuleLoadData(np.frombuffer(binary.data, np.uint8)), doing)
            self._modules[int(module)] = module
            function = check(cu.cuModuleGetFunction(module, b"ark_loop"), doing)

            def attribute(name: str) -> int:
                wanted = getattr(_FUNCTION, f"CU_FUNC_ATTRIBUTE_{name}")
                return int(check(cu.cuFuncGetAttribute(wanted, function), doing))

            return Program(
                module,
                function,
                attribute("NUM_REGS"),
                attribute("SHARED_SIZE_BYTES"),
            )

    def unload(self, program: object) -> None:
        if not isinstance(program, Program):
            raise TypeError("unload needs a Program, as load returns it")
        self._admitted = {k: t for k, t in self._admitted.items() if k[0] != int(program.module)}
        if self._modules.pop(int(program.module), None) is not None:
            with current(self.context):
                check(cu.cuModuleUnload(program.module), f"unloading a kernel of {self.label}")

    def launch(
        self, program: object, params: bytes, grid: Grid, stream: int | None = None
    ) -> CudaLaunch:
        """Starts the kernel and returns its launch. stream: the caller's CUstream to run on; by
        default the device's own stream.
        """
        if not isinstance(program, Program):
            raise TypeError("launch needs a Program, as load returns it")
        self._returned.settle()
        doing = self._admit(program, grid)
        begin, end = self._events.take(doing), self._events.take(doing)
        if stream is None:
            self._ordered.launch(program, params, grid, (begin, end), doing)
        else:
            queue = cu.CUstream(stream)
            with current(self.context):
                check(cu.cuEventRecord(begin, queue), doing)
                enqueue(program, params, grid, queue, doing)
                check(cu.cuEventRecord(end, queue), doing)
        launch = CudaLaunch(self._events, begin, end)
        self._launches.add(launch)
        return launch

    def repeated_launch(
        self, program: object, params: np.ndarray, grid: Grid
    ) -> CudaRepeatedLaunch:
        """See StreamDevice.repeated_launch."""
        if not isinstance(program, Program):
            raise TypeError("repeated_launch needs a Program, as load returns it")
        with current(self.context):
            self._admit(program, grid)
            relaunch = CudaRepeatedLaunch(self._events, program, params, grid)
        self._launches.add(relaunch)
        return relaunch

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Captures launches into a CUDA graph; see GraphDevice.recording. Work on other streams is
        not captured.
        """
        relaxed = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        doing = f"making a kernel for a graph of {self.label}"
        before = check(cu.cuThreadExchangeStreamCaptureMode(relaxed), doing)
        try:
            yield
        finally:
            cu.cuThreadExchangeStreamCaptureMode(before)

    def record(
        self,
        program: object,
        params: bytes,
        grid: Grid,
        stream: int,
        cleared: Sequence[tuple[int, int]],
    ) -> None:
        """Adds a launch to the CUDA graph that is being captured; see GraphDevice.record. The
        launch has no events, because events of a captured launch cannot be queried.
        """
        if not isinstance(program, Program):
            raise TypeError("record needs a Program, as load returns it")
        queue = cu.CUstream(stream)
        with current(self.context):
            doing = self._admit(program, grid)
            for address, nbytes in cleared:
                check(cu.cuMemsetD8Async(address, 0, nbytes, queue), doing)
            enqueue(program, params, grid, queue, doing)

    def _admit(self, program: Program, grid: Grid) -> str:
        """Checks once for each program and grid that all blocks can be resident at the same time.
        Returns the beginning of error messages about such a launch.
        """
        key = (int(program.module), grid)
        if key in self._admitted:
            return self._admitted[key]
        doing = (
            f"launching the loop kernel on {self.label} ({grid.processors} blocks of "
            f"{grid.threads} threads with {program.registers} registers each and "
            f"{grid.shared_bytes} + {program.shared_bytes} bytes of shared memory)"
        )
        limit = _FUNCTION.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with current(self.context):
            check(cu.cuFuncSetAttribute(program.function, limit, grid.shared_bytes), doing)
            self._check_resident(program, grid, doing)
        self._admitted = {k: t for k, t in self._admitted.items() if k[0] != key[0]}
        self._admitted[key] = doing
        return doing

    def _check_resident(self, program: Program, grid: Grid, doing: str) -> None:
        asked = program.function, grid.threads, grid.shared_bytes
        blocks = check(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(*asked), doing)
        resident = int(blocks) * self._attribute("MULTIPROCESSOR_COUNT")
        if resident < grid.processors:
            raise SystemError(
                f"{doing}: only {resident} blocks can be resident at once, and every block of a "
                f"loop kernel must be; plan for at most {resident} processors"
            )

    def copies(self) -> Copies:
        header = resources.files("ark_cuda").joinpath("copies.h").read_text()
        return Copies(header, "libcuda.so.1", int(self._handle))

    def export(self, memory: Memory) -> bytes:
        if memory.kind != "symmetric" or not memory.owned:
            raise GpuError("only a rank's own symmetric memory can be exported")
        with current(self.context):
            return peer.export(self._handle, self.index, memory.address, memory.nbytes)

    def map_peer(self, handle: bytes) -> Memory:
        with current(self.context):
            mapped = peer.open_handle(self._handle, self.label, handle)
        if mapped.imported:
            self._peers.add(mapped.address)
        return Memory(mapped.address, mapped.nbytes, "symmetric", owned=False)

    def free_bytes(self) -> int:
        self._returned.settle()
        with current(self.context):
            free, _ = check(cu.cuMemGetInfo(), f"asking {self.label} for its free memory")
        return int(free)

    def _busy(self) -> bool:
        """True while a kernel is running; False after a device fault."""
        with contextlib.suppress(GpuError):
            return not all(launch.done() for launch in self._launches)
        return False

    def close(self) -> None:
        """Releases the primary context. It continues to exist as long as another user in the
        process holds it.
        """
        if self.context is None or self._busy():
            return
        self._returned.settle()
        with current(self.context):
            self._events.close()
            for address in self._peers:
                cu.cuIpcCloseMemHandle(address)
            for module in self._modules.values():
                cu.cuModuleUnload(module)
            for stream in (self._stream, self._copies):
                (code,) = cu.cuStreamDestroy(stream)
                if code != cu.CUresult.CUDA_SUCCESS:
                    raise GpuError(f"closing {self.label}: {words(code)}")
        self._peers.clear()
        self._modules.clear()
        self.context = None
        cu.cuDevicePrimaryCtxRelease(self._handle)
