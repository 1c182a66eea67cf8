"""An opened AMD GPU: memory, code objects, the loop kernel's launch, peers' memory.

The loop kernel runs on a stream of its own and copies on another, so that the host can read tokens
and feed the loop while the kernel runs. Called by ark.runtime through ark.backend.devices.Device.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import time
from dataclasses import dataclass
from importlib import resources
from typing import Any
from weakref import WeakSet

import numpy as np

from ark.backend.devices import Binary, Copies, Grid, Memory, MemoryKind, Queue
from ark.errors import GpuError, InvalidUsageError, SystemError
from ark_rocm import driver, links, machines, queues
from ark_rocm.driver import call, device_properties
from ark_rocm.probe import probe, text

_IPC_BYTES = 64
_COPY_KINDS = {"in": "hipMemcpyHostToDevice", "out": "hipMemcpyDeviceToHost"}


@dataclass(frozen=True)
class Program:
    """A loaded code object and its loop kernel."""

    module: Any
    function: Any


class Device:
    """One GPU; see ark.backend.devices.Device for the methods."""

    # hipMalloc's memory is coarse-grained: HIP promises what is copied there to the next kernel.
    fed: MemoryKind = "symmetric"

    def __init__(self, index: int) -> None:
        found = probe()
        if not 0 <= index < len(found.devices):
            reason = found.reason or f"there are {len(found.devices)} AMD GPUs"
            raise SystemError(
                f"AMD GPU {index} cannot be opened: {reason}; {found.remedy or 'name another one'}"
            )
        self.index = index
        self._hip = driver.module()
        self._select()
        info = found.devices[index]
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
            peer_stores=not links.modifying(self._hip, index, self.arch, len(found.devices)),
        )
        self._loop_stream = self._stream()
        self._copy_stream = self._stream()
        self._programs: list[Program] = []
        self._launches: WeakSet[Launch] = WeakSet()
        self._opened: set[int] = set()  # addresses of other processes' memory
        self._closed = False

    def _stream(self) -> Any:
        make = self._hip.hipStreamCreateWithFlags
        return call("hipStreamCreateWithFlags", make, driver.STREAM_NON_BLOCKING)

    def _select(self) -> None:
        """HIP's current device belongs to the calling thread."""
        call("hipSetDevice", self._hip.hipSetDevice, self.index)

    def alloc(self, nbytes: int, kind: MemoryKind) -> Memory:
        self._select()
        size = max(nbytes, 1)
        hip = self._hip
        if kind == "host":
            # Coherent (fine-grained): the kernel sees the host's writes while it runs.
            flags = driver.HOST_MAPPED | driver.HOST_COHERENT
            result = hip.hipHostMalloc(size, flags)
        elif kind == "symmetric":
            # Uncached: peers' stores and signals must not be hidden by this device's caches.
            result = hip.hipExtMallocWithFlags(size, driver.MALLOC_UNCACHED)
        else:
            result = hip.hipMalloc(size)
        if int(result[0]) != 0:
            if "OutOfMemory" in getattr(result[0], "name", "OutOfMemory"):
                raise SystemError(
                    f"{nbytes} bytes of {kind} memory were asked for, but AMD GPU {self.index} has "
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

    def free(self, memory: Memory) -> None:
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
        """See Device.launch. stream: not taken yet; InvalidUsageError where one is given."""
        if stream is not None:
            raise InvalidUsageError("a loop kernel on AMD devices runs on its own stream only")
        assert isinstance(program, Program)
        self._select()
        self._check_resident(program, grid)
        launch = Launch(self, program, params, grid)
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
                f"the plan has {grid.processors} processors of {grid.threads} threads and "
                f"{grid.shared_bytes} bytes of shared memory, but AMD GPU {self.index} holds only "
                f"{blocks} such blocks on each of {self.machine.processors} compute units at "
                f"once; make the plan for this machine"
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
        handle = call("hipIpcGetMemHandle", self._hip.hipIpcGetMemHandle, memory.address)
        raw = ctypes.string_at(int(handle), _IPC_BYTES)
        about = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": self.index,
            "address": memory.address,
            "nbytes": memory.nbytes,
        }
        return raw + json.dumps(about).encode()

    def map_peer(self, handle: bytes) -> Memory:
        self._select()
        raw, about = handle[:_IPC_BYTES], json.loads(handle[_IPC_BYTES:])
        if about["host"] != socket.gethostname():
            raise SystemError(
                f"a peer's memory lies on {about['host']}, this rank runs on "
                f"{socket.gethostname()}; memory of another machine cannot be mapped: run these "
                f"ranks on one machine"
            )
        if about["pid"] == os.getpid():
            self._reach(int(about["device"]))
            return Memory(about["address"], about["nbytes"], "symmetric", owned=False)
        theirs = self._hip.hipIpcMemHandle_st()
        ctypes.memmove(int(theirs), raw, _IPC_BYTES)
        address = call(
            "hipIpcOpenMemHandle",
            self._hip.hipIpcOpenMemHandle,
            theirs,
            driver.IPC_LAZY_PEER_ACCESS,
            doing=f"mapping the memory of process {about['pid']} on AMD GPU {about['device']}",
        )
        self._opened.add(int(address))
        return Memory(int(address), about["nbytes"], "symmetric", owned=False)

    def _reach(self, peer: int) -> None:
        """Lets kernels on this device use another device's memory within one process."""
        if peer == self.index:
            return
        hip = self._hip
        if not int(call("hipDeviceCanAccessPeer", hip.hipDeviceCanAccessPeer, self.index, peer)):
            raise SystemError(
                f"AMD GPU {self.index} cannot reach the memory of AMD GPU {peer}; use GPUs that "
                f"`rocm-smi --showtopo` shows as linked"
            )
        result = hip.hipDeviceEnablePeerAccess(peer, 0)
        code = result[0] if isinstance(result, tuple) else result
        if int(code) != 0 and "AlreadyEnabled" not in getattr(code, "name", ""):
            raise driver.failure("hipDeviceEnablePeerAccess", code, f"reaching AMD GPU {peer}")

    def free_bytes(self) -> int:
        self._select()
        free, _ = call("hipMemGetInfo", self._hip.hipMemGetInfo)
        return int(free)

    def _busy(self) -> bool:
        """Is a kernel running? After a fault none is."""
        with contextlib.suppress(GpuError):
            return not all(launch.done() for launch in self._launches)
        return False

    def close(self) -> None:
        if self._closed or self._busy():
            return
        self._closed = True
        self._select()
        for program in self._programs:
            call("hipModuleUnload", self._hip.hipModuleUnload, program.module)
        for stream in (self._loop_stream, self._copy_stream):
            call("hipStreamDestroy", self._hip.hipStreamDestroy, stream)


class Launch:
    """A running loop kernel; see ark.backend.devices.Launch."""

    def __init__(self, device: Device, program: Program, params: bytes, grid: Grid) -> None:
        hip = self._hip = device._hip
        self._device = device
        self._params = ctypes.create_string_buffer(params, len(params))
        self._begin = call("hipEventCreate", hip.hipEventCreate)
        self._end = call("hipEventCreate", hip.hipEventCreate)
        stream = device._loop_stream
        call("hipEventRecord", hip.hipEventRecord, self._begin, stream)
        # A plain launch: a cooperative one may share one queue with every copy of the process,
        # and that all blocks are resident together has been checked.
        call(
            "hipModuleLaunchKernel",
            hip.hipModuleLaunchKernel,
            program.function,
            grid.processors,
            1,
            1,
            grid.threads,
            1,
            1,
            grid.shared_bytes,
            stream,
            [ctypes.addressof(self._params)],
            None,
            doing=f"starting {grid.processors} blocks of {grid.threads} threads",
        )
        call("hipEventRecord", hip.hipEventRecord, self._end, stream)
        self._done = False

    def done(self) -> bool:
        if self._done:
            return True
        self._device._select()
        result = self._hip.hipEventQuery(self._end)
        code = result[0] if isinstance(result, tuple) else result
        if "NotReady" in getattr(code, "name", ""):
            return False
        if int(code) != 0:
            raise driver.failure("hipEventQuery", code, "running the loop kernel")
        self._done = True
        return True

    def wait(self, timeout_s: float | None = None) -> bool:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 20e-6
        while not self.done():
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)
        return True

    def elapsed_ms(self) -> float:
        self._device._select()
        elapsed = self._hip.hipEventElapsedTime
        return float(call("hipEventElapsedTime", elapsed, self._begin, self._end))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            for event in (self._begin, self._end):
                self._hip.hipEventDestroy(event)
