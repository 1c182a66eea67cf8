"""The HIP stand-in through hip-python: modules, launches, streams, events, occupancy, hiprtc."""

from __future__ import annotations

import ctypes
import time

import numpy as np
import pytest
from ark_rocm_emulator import emulated, failures, instructions
from hip import hip, hiprtc
from hip_runner import (
    Arguments,
    Buffers,
    check,
    code_object,
    download,
    exchange_between_devices,
    launch,
)

from tests.kept import compile_hip

ERROR = hip.hipError_t
SAXPY = """
extern "C" __global__ void scale(float* x, float a) {
  x[blockIdx.x * blockDim.x + threadIdx.x] *= a;
}
"""


def _module(source: str, arch: str = "gfx942"):
    return check(hip.hipModuleLoadData(code_object(source, arch, ("-O3",))))


def _function(name: str, source: str, arch: str = "gfx942"):
    return check(hip.hipModuleGetFunction(_module(source, arch), name.encode()))


def test_arguments_in_one_buffer() -> None:
    """A kernel gets its arguments in one buffer: HIP's parameter `extra` instead of
    kernelParams.
    """
    x = np.arange(256, dtype=np.int32)
    with emulated("gfx942"), Buffers() as buffers:
        function, there = _function("jump_table", "elementwise.hip"), buffers.upload(x)
        packed = np.array([int(there), int(there)], np.uint64).tobytes() + np.int32(256).tobytes()
        data = ctypes.create_string_buffer(packed, len(packed))
        size = ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(data), 2, ctypes.addressof(size), 3)
        check(hip.hipModuleLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, None, None, extra))
        check(hip.hipDeviceSynchronize())
        assert download(there, (256,), np.int32)[8] == 24
        short = ctypes.c_size_t(8)
        extra[3] = ctypes.addressof(short)
        refused = hip.hipModuleLaunchKernel(function, 1, 1, 1, 256, 1, 1, 0, None, None, extra)
        assert refused == (ERROR.hipErrorInvalidValue,)


def test_impossible_launches_are_hip_errors() -> None:
    with emulated("gfx942", compute_units=2), Buffers() as buffers:
        function = _function("ring_exchange", "sync.hip")
        pointer = buffers.empty(1 << 16)
        arguments = Arguments(pointer, pointer, pointer, np.int32(1))

        def start(grid: int, block: int, lds: int = 0, cooperative: bool = False):
            shape = (grid, 1, 1, block, 1, 1, lds, None, arguments.array)
            if cooperative:
                return hip.hipModuleLaunchCooperativeKernel(function, *shape)[0]
            return hip.hipModuleLaunchKernel(function, *shape, None)[0]

        assert start(0, 64) == ERROR.hipErrorInvalidValue
        assert start(1, 0) == ERROR.hipErrorInvalidConfiguration
        assert start(1, 2048) == ERROR.hipErrorInvalidValue
        assert start(1, 512) == ERROR.hipErrorLaunchFailure  # above its launch bounds
        assert start(1, 64, lds=70_000) == ERROR.hipErrorInvalidValue
        limit = check(hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(function, 256, 0))
        too_large = start(2 * limit + 1, 256, cooperative=True)
        assert too_large == ERROR.hipErrorCooperativeLaunchTooLarge
        none = hip.hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, None, None)
        assert none == (ERROR.hipErrorInvalidValue,)


def test_code_that_cannot_run_is_refused() -> None:
    with emulated("gfx942"):
        other = code_object("elementwise.hip", "gfx1100", ("-O3",))
        assert hip.hipModuleLoadData(other)[0] == ERROR.hipErrorNoBinaryForGpu
        assert hip.hipModuleLoadData(b"not a code object" * 9)[0] == ERROR.hipErrorInvalidImage
        module = _module("elementwise.hip")
        assert hip.hipModuleGetFunction(module, b"nothing")[0] == ERROR.hipErrorNotFound
        check(hip.hipModuleUnload(module))
        assert hip.hipModuleUnload(module) == (ERROR.hipErrorInvalidHandle,)


def test_module_variables_are_read_and_written() -> None:
    with emulated("gfx942"), Buffers() as buffers:
        module, out = _module("movement.hip"), buffers.empty(256)
        function = check(hip.hipModuleGetFunction(module, b"module_globals"))
        counter, size = check(hip.hipModuleGetGlobal(module, b"module_counter"))
        assert size == 4 and download(counter, (1,), np.int32)[0] == 5
        check(hip.hipMemcpyHtoD(counter, np.array([70], np.int32), 4))
        launch(function, 1, 64, Arguments(out))
        check(hip.hipDeviceSynchronize())
        assert download(counter, (1,), np.int32)[0] == 71
        assert download(out, (64,), np.int32)[3] == 79
        assert hip.hipModuleGetGlobal(module, b"nothing")[0] == ERROR.hipErrorNotFound


def test_attributes_and_occupancy_follow_from_the_code_object() -> None:
    attribute = hip.hipFunction_attribute
    with emulated("gfx942"):
        function = _function("block_sum", "reduce.hip")
        lds = attribute.HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        assert check(hip.hipFuncGetAttribute(lds, function)) == 1024
        threads = attribute.HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        assert check(hip.hipFuncGetAttribute(threads, function)) == 256
        occupancy = hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
        full = check(occupancy(function, 256, 0))
        assert full == 8  # 4 SIMDs of 8 waves, 4 waves a block
        assert check(occupancy(function, 256, 31 * 1024)) == 2  # 64 KB of LDS
        assert check(occupancy(function, 512, 0)) == 0
        grid, block = check(hip.hipModuleOccupancyMaxPotentialBlockSize(function, 0, 0))
        assert (grid * block) % (8 * 2048) == 0


def test_streams_keep_order_and_events_mark_it() -> None:
    x = np.ones(256, np.float32)
    with emulated("gfx942"), Buffers() as buffers:
        there = buffers.upload(x)
        module = check(hip.hipModuleLoadData(compile_hip(SAXPY, "gfx942")))
        function = check(hip.hipModuleGetFunction(module, b"scale"))
        first, second = check(hip.hipStreamCreate()), check(hip.hipStreamCreateWithFlags(1))
        start, stop = check(hip.hipEventCreate()), check(hip.hipEventCreate())
        check(hip.hipEventRecord(start, first))
        for _ in range(5):
            launch(function, 4, 64, Arguments(there, np.float32(2)), stream=first)
        check(hip.hipEventRecord(stop, first))
        check(hip.hipStreamWaitEvent(second, stop, 0))
        launch(function, 4, 64, Arguments(there, np.float32(3)), stream=second)
        check(hip.hipStreamSynchronize(second))
        assert (download(there, x.shape, x.dtype) == 96).all()
        assert check(hip.hipEventElapsedTime(start, stop)) > 0
        check(hip.hipEventQuery(stop))
        unmarked = check(hip.hipEventCreate())
        assert hip.hipEventElapsedTime(start, unmarked)[0] == ERROR.hipErrorInvalidHandle
        check(hip.hipStreamDestroy(first))
        assert hip.hipStreamQuery(first) == (ERROR.hipErrorInvalidHandle,)
        executed, launches = instructions()
        assert launches == 6 and executed >= 6 * 4


def test_null_stream_waits_for_blocking_streams() -> None:
    x = np.ones(64, np.float32)
    with emulated("gfx942"), Buffers() as buffers:
        there = buffers.upload(x)
        module = check(hip.hipModuleLoadData(compile_hip(SAXPY, "gfx942")))
        function = check(hip.hipModuleGetFunction(module, b"scale"))
        stream = check(hip.hipStreamCreate())
        for k in range(6):
            launch(
                function,
                1,
                64,
                Arguments(there, np.float32(k + 1)),
                stream=stream if k % 2 else None,
            )
        assert (download(there, x.shape, x.dtype) == 720).all()


class Mapped:
    """Host memory with an array, mapped so that devices can access it."""

    def __init__(self, shape: tuple[int, ...], dtype: type) -> None:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        self.address = int(check(hip.hipHostMalloc(size, 0x40000000)))
        raw = (ctypes.c_uint8 * size).from_address(self.address)
        self.array = np.frombuffer(raw, dtype).reshape(shape)
        self.array[...] = 0


def _wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, [f.message for f in failures()]
        time.sleep(0.001)


@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_host_feeds_a_persistent_kernel(arch: str) -> None:
    n, blocks = 300, 3
    x = np.arange(n, dtype=np.int32)
    with emulated(arch, external_wait_ms=20000), Buffers() as buffers:
        there = buffers.upload(x)
        commands, posted = Mapped((16, 2), np.uint32), Mapped((1,), np.uint32)
        finished = Mapped((1,), np.uint32)
        stream = check(hip.hipStreamCreateWithFlags(1))
        arguments = Arguments(
            commands.address, posted.address, finished.address, there, np.int32(n)
        )
        function = _function("persistent_queue", "sync.hip", arch)
        launch(function, blocks, 64, arguments, stream=stream, cooperative=True)
        script = [(2, 5), (1, 3), (2, 0xFFFFFFFF), (1, 2), (3, 0)]
        for step, command in enumerate(script):
            assert hip.hipStreamQuery(stream) == (ERROR.hipErrorNotReady,)
            commands.array[step] = command
            posted.array[0] = step + 1
            _wait_until(lambda s=step: finished.array[0] == blocks * (s + 1))
        check(hip.hipStreamSynchronize(stream))
        expected = ((x + 5) * 3 - 1) * 2
        np.testing.assert_array_equal(download(there, x.shape, x.dtype), expected)


def test_starved_persistent_kernel_is_reported() -> None:
    with emulated("gfx942", external_wait_ms=300, report=0), Buffers() as buffers:
        there, flags = buffers.upload(np.zeros(64, np.int32)), Mapped((64,), np.uint32)
        arguments = Arguments(
            flags.address, flags.address + 128, flags.address + 192, there, np.int32(64)
        )
        launch(_function("persistent_queue", "sync.hip"), 1, 64, arguments)
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorLaunchTimeOut,)
        assert "persistent_queue" in failures()[0].message


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx1100"])
@pytest.mark.parametrize("seed", range(3))
def test_two_devices_put_signal_and_wait(arch: str, seed: int) -> None:
    with emulated(arch, 2, seed=seed):
        exchange_between_devices(code_object("sync.hip", arch, ("-O3",)))


def test_hiprtc_compiles_with_headers_and_options() -> None:
    source = b"""
#include "factor.h"
extern "C" __global__ void fill(float* out) { out[threadIdx.x] = FACTOR * VALUE * threadIdx.x; }
"""
    with emulated("gfx942"), Buffers() as buffers:
        headers, names = [b"#define FACTOR 3.0f\n"], [b"factor.h"]
        program = check(hiprtc.hiprtcCreateProgram(source, b"fill.hip", 1, headers, names))
        options = [b"--offload-arch=gfx942", b"-DVALUE=2.0f"]
        check(hiprtc.hiprtcCompileProgram(program, len(options), options))
        size = check(hiprtc.hiprtcGetCodeSize(program))
        code = bytearray(size)
        check(hiprtc.hiprtcGetCode(program, code))
        check(hiprtc.hiprtcDestroyProgram(program.createRef()))
        module, out = check(hip.hipModuleLoadData(code)), buffers.empty(256)
        launch(check(hip.hipModuleGetFunction(module, b"fill")), 1, 64, Arguments(out))
        check(hip.hipDeviceSynchronize())
        np.testing.assert_array_equal(download(out, (64,), np.float32), np.arange(64) * 6.0)


def test_hiprtc_reports_program_errors() -> None:
    with emulated("gfx942"):
        source = b'extern "C" __global__ void broken(float* x) { x[0] = nonsense; }'
        program = check(hiprtc.hiprtcCreateProgram(source, b"broken", 0, None, None))
        failed = hiprtc.hiprtcCompileProgram(program, 0, None)[0]
        assert failed == hiprtc.hiprtcResult.HIPRTC_ERROR_COMPILATION
        log = bytearray(check(hiprtc.hiprtcGetProgramLogSize(program)))
        check(hiprtc.hiprtcGetProgramLog(program, log))
        assert b"nonsense" in log
        assert check(hiprtc.hiprtcVersion()) == (9, 0)
