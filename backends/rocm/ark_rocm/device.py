"""An opened AMD GPU: memory, code objects, launches of the loop kernel.

The loop kernel and the copies run on separate streams, so that the host can read tokens and feed
the loop while the kernel runs. Called by ark.runtime through ark.backend.devices.Device.
"""

from __future__ import annotations

import contextlib
import ctypes
from importlib import resources
from typing import Any
from weakref import WeakSet

import numpy as np

from ark.backend.devices import Binary, Copies, Grid, Memory, MemoryKind, Queue
from ark.backend.returned import Returned
from ark.errors import GpuError, InvalidUsageError, SystemError
from ark_rocm import driver, links, machines, peer, queues
from ark_rocm.driver import call, device_properties
from ark_rocm.launches import Launch, Program
from ark_rocm.probe import probe, text

VECTOR_BYTES = 16  # of the widest load
_COPY_KINDS = {"in": "hipMemcpyHostToDevice", "out": "hipMemcpyDeviceToHost"}


class Device:
    """One GPU; see ark.backend.devices.Device for the methods."""

    # The kind of memory in which a running kernel sees the host's writes. Other inputs are copied
    # to memory of hipMalloc, which is coarse-grained: HIP makes these copies visible only to the
    # next kernel.
    fed: MemoryKind = "symmetric"

    def __init__(self, index: int) -> None:
        probed = probe()
        if not 0 <= index < len(probed.devices):
            reason = probed.reason or f"there are {len(probed.devices)} AMD GPUs"
            raise SystemError(
                f"AMD GPU {index} cannot be opened: {reason}; "
                f"{probed.remedy or 'choose another one'}"
            )
        self.index = index
        self._hip = driver.module()
        self._select()
        info = probed.devices[index]
        self.arch = info.arch
        self.dlpack = (10, index)
        properties = device_properties(self._hip, index)
        machines.describe(self.arch)
        self.machine = machines.opened(
            text(properties.name) or self.arch,
            self.arch,
            int(properties.multiProcessorCount),
            int(properties.sharedMemPerBlock),
            info.memory_bytes,
            peer_stores=not links.modifying(self._hip, index, self.arch, len(probed.devices)),
        )
        self._loop_stream = self._stream()
        self._copy_stream = self._stream()
        self._programs: list[Program] = []
        self._launches: WeakSet[Launch] = WeakSet()
        self._opened: set[int] = set()  # mapped addresses of other processes' memory
        self._returned = Returned(self._free, self._busy)
        self._closed = False

    def _stream(self) -> Any:
        make = self._hip.hipStreamCreateWithFlags
        return call("hipStreamCreateWithFlags", make, driver.STREAM_NON_BLOCKING)

    def _select(self) -> None:
        """Selects the device in the calling thread; HIP's current device is per thread."""
        driver.select(self._hip, self.index)

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        self._select()
        self._returned.settle()
        # The size is rounded up to whole vectors. A kernel loads a slice that begins at any element
        # as whole aligned vectors, of which the last may end after the tensor.
        size = -(-max(nbytes, 1) // VECTOR_BYTES) * VECTOR_BYTES
        hip = self._hip
        result = self._ask(size, kind)
        if int(result[0]) != 0 and self._returned.force():
            result = self._ask(size, kind)
        if int(result[0]) != 0:
            if "OutOfMemory" in getattr(result[0], "name", "OutOfMemory"):
                raise SystemError(
                    f"{nbytes} bytes of {kind} memory are needed, but AMD GPU {self.index} has "
                    f"{self.free_bytes()} bytes free; use a smaller model, context or batch, or "
                    f"end other programs on this GPU"
                )
            raise driver.failure("allocation", result[0], f"asking for {nbytes} bytes of {kind}")
        address = int(result[1])
        if kind == "host":
            view = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            view[:] = 0
            on_device = call("hipHostGetDevicePointer", hip.hipHostGetDevicePointer, address, 0)
            return Memory(int(on_device), nbytes, kind, view[:nbytes])
        self.zero(address, size)
        return Memory(address, nbytes, kind)

    def _ask(self, size: int, kind: MemoryKind) -> Any:
        """HIP's result of an allocation: an error code and an address."""
        if kind == "host":
            # Host-mapped memory is coherent (fine-grained): the kernel sees the host's writes while
            # it runs.
            return self._hip.hipHostMalloc(size, driver.HOST_MAPPED | driver.HOST_COHERENT)
        if kind == "symmetric":
            # Symmetric memory is uncached, because peers' stores and signals must not be hidden by
            # this device's caches.
            return self._hip.hipExtMallocWithFlags(size, driver.MALLOC_UNCACHED)
        return self._hip.hipMalloc(size)

    def free(self, memory: Memory) -> None:
        if not self._closed:
            self._returned.add(memory)

    def _free(self, memory: Memory) -> None:
        self._select()
        if memory.host is not None:
            call("hipHostFree", self._hip.hipHostFree, int(memory.host.ctypes.data))
        elif memory.owned:
            call("hipFree", self._hip.hipFree, memory.address)
        elif memory.address in self._opened:
            self._opened.remove(memory.address)
            call("hipIpcCloseMemHandle", self._hip.hipIpcCloseMemHandle, memory.address)

    def write(self, address: int, data: np.ndarray) -> None:
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._copy(address, int(flat.ctypes.data), flat.nbytes, "in")

    def read(self, address: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self._copy(int(out.ctypes.data), address, nbytes, "out")
        return out

    def _copy(self, to: int, source: int, nbytes: int, direction: str) -> None:
        if nbytes == 0:
            return
        self._select()
        kind = getattr(self._hip.hipMemcpyKind, _COPY_KINDS[direction])
        call(
            "hipMemcpyAsync",
            self._hip.hipMemcpyAsync,
            to,
            source,
            nbytes,
            kind,
            self._copy_stream,
            doing=f"copying {nbytes} bytes",
        )
        call("hipStreamSynchronize", self._hip.hipStreamSynchronize, self._copy_stream)

    def zero(self, address: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        self._select()
        call("hipMemsetAsync", self._hip.hipMemsetAsync, address, 0, nbytes, self._copy_stream)
        call("hipStreamSynchronize", self._hip.hipStreamSynchronize, self._copy_stream)

    def load(self, binary: Binary) -> Program:
        self._select()
        module = call(
            "hipModuleLoadData",
            self._hip.hipModuleLoadData,
            binary.data,
            doing=f"loading the loop kernel for {self.arch}",
        )
        function = call("hipModuleGetFunction", self._hip.hipModuleGetFunction, module, b"ark_loop")
        program = Program(module, function)
        self._programs.append(program)
        return program

    def unload(self, program: object) -> None:
        if isinstance(program, Program) and program in self._programs:
            self._programs.remove(program)
            self._select()
            call("hipModuleUnload", self._hip.hipModuleUnload, program.module)

    def launch(
        self, program: object, params: bytes, grid: Grid, stream: int | None = None
    ) -> Launch:
        """Starts the kernel and returns its launch. Raises InvalidUsageError if a stream is passed:
        that is not supported yet.
        """
        if stream is not None:
            raise InvalidUsageError(
                "on AMD GPUs a launch always uses ark's own stream; omit the argument stream"
            )
        assert isinstance(program, Program)
        self._select()
        self._returned.settle()
        self._check_resident(program, grid)
        launch = Launch(self._hip, self.index, self._loop_stream, program, params, grid)
        self._launches.add(launch)
        return launch

    def _check_resident(self, program: Program, grid: Grid) -> None:
        occupancy = self._hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
        blocks = int(
            call(
                "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor",
                occupancy,
                program.function,
                grid.threads,
                grid.shared_bytes,
            )
        )
        if blocks * self.machine.processors < grid.processors:
            raise SystemError(
                f"the plan has {grid.processors} blocks, each of {grid.threads} threads and "
                f"{grid.shared_bytes} bytes of shared memory; they must run at once, but AMD GPU "
                f"{self.index} can run only {blocks} such blocks on each of its "
                f"{self.machine.processors} compute units; plan for this machine"
            )

    def copies(self) -> Copies:
        header = resources.files("ark_rocm").joinpath("copies.h").read_text()
        return Copies(header, driver.library(), self.index)

    def open_queue(self, slots: int) -> Queue:
        self._select()
        return queues.create(self._hip, self.index, slots)

    def close_queue(self, queue: Queue) -> None:
        queues.destroy(queue)

    def export(self, memory: Memory) -> bytes:
        self._select()
        return peer.export(self._hip, self.index, memory.address, memory.nbytes)

    def map_peer(self, handle: bytes) -> Memory:
        self._select()
        mapped = peer.open_handle(self._hip, self.index, handle)
        if mapped.imported:
            self._opened.add(mapped.address)
        return Memory(mapped.address, mapped.nbytes, "symmetric", owned=False)

    def free_bytes(self) -> int:
        self._select()
        self._returned.settle()
        free, _ = call("hipMemGetInfo", self._hip.hipMemGetInfo)
        return int(free)

    def _busy(self) -> bool:
        """True while a kernel of this device is running. False after a kernel's fault, because no
        kernel runs then.
        """
        with contextlib.suppress(GpuError):
            return not all(launch.done() for launch in self._launches)
        return False

    def close(self) -> None:
        if self._closed or self._busy():
            return
        self._closed = True
        # After a kernel's fault every HIP call returns the fault's error, but still frees as much
        # as it can.
        with contextlib.suppress(GpuError):
            self._select()
            self._returned.settle()
        programs, self._programs = self._programs, []
        for program in programs:
            with contextlib.suppress(GpuError):
                call("hipModuleUnload", self._hip.hipModuleUnload, program.module)
        for stream in (self._loop_stream, self._copy_stream):
            with contextlib.suppress(GpuError):
                call("hipStreamDestroy", self._hip.hipStreamDestroy, stream)
