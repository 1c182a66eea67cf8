"""The HIP stand-in through hip-python: memory of all kinds, copies, peers, and other processes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
from ark_rocm_emulator import emulated, failures
from hip import hip
from hip_runner import TO_DEVICE, TO_HOST, Arguments, Buffers, check, code_object, download, launch
from two_processes import exchange

from tests.kept import compile_hip

ERROR = hip.hipError_t


def _function(name: str, source: str = "elementwise.hip", arch: str = "gfx942"):
    module = check(hip.hipModuleLoadData(code_object(source, arch, ("-O3",))))
    return check(hip.hipModuleGetFunction(module, name.encode()))


def test_copies_go_there_and_back() -> None:
    data = np.arange(1000, dtype=np.int64)
    with emulated("gfx942"), Buffers() as buffers:
        first, second = buffers.upload(data), buffers.empty(data.nbytes)
        stream = check(hip.hipStreamCreate())
        check(hip.hipMemcpyAsync(second, first, data.nbytes, hip.hipMemcpyKind(3), stream))
        check(hip.hipStreamSynchronize(stream))
        np.testing.assert_array_equal(download(second, data.shape, data.dtype), data)
        check(hip.hipMemset(second, 0x5A, 100))
        filled = download(second, (data.nbytes,), np.uint8)
        assert (filled[:100] == 0x5A).all() and filled[104] == 13
        check(hip.hipMemsetD32(second, 0x01020304, 10))
        assert (download(second, (10,), np.uint32) == 0x01020304).all()


def test_unwritten_memory_is_not_zero() -> None:
    with emulated("gfx942"), Buffers() as buffers:
        assert (download(buffers.empty(64), (64,), np.uint8) == 0xCB).all()


def test_wrong_pointers_and_sizes_are_hip_errors() -> None:
    data = np.zeros(64, np.uint8)
    with emulated("gfx942"), Buffers() as buffers:
        pointer = buffers.empty(64)
        assert hip.hipMemcpy(pointer, data, 65, TO_DEVICE) == (ERROR.hipErrorInvalidValue,)
        assert hip.hipMemcpy(pointer, data, 64, hip.hipMemcpyKind(4))[0] == ERROR.hipSuccess
        assert hip.hipMemcpy(0, data, 64, TO_DEVICE) == (ERROR.hipErrorInvalidValue,)
        assert hip.hipHostFree(pointer) == (ERROR.hipErrorInvalidValue,)
        freed = check(hip.hipMalloc(64))
        check(hip.hipFree(freed))
        assert hip.hipFree(freed) == (ERROR.hipErrorInvalidValue,)
        assert hip.hipMemcpy(freed, data, 64, TO_DEVICE) == (ERROR.hipErrorInvalidValue,)
        assert hip.hipMalloc(1 << 45)[0] == ERROR.hipErrorOutOfMemory
        check(hip.hipFree(0))


def test_host_memory_is_one_memory() -> None:
    with emulated("gfx942"):
        pointer = check(hip.hipHostMalloc(4 * 256, 0x2))
        assert int(check(hip.hipHostGetDevicePointer(pointer, 0))) == int(pointer)
        host = np.ctypeslib.as_array((ctypes.c_int * 256).from_address(int(pointer)))
        host[:] = np.arange(256)
        launch(
            _function("jump_table"),
            1,
            256,
            Arguments(int(pointer), int(pointer), np.int32(256)),
        )
        check(hip.hipDeviceSynchronize())
        assert host[8] == 24 and host[4] == -4  # 8 & 7 == 0: times three; 4: negated
        del host
        assert hip.hipFree(pointer) == (ERROR.hipErrorInvalidValue,)
        check(hip.hipHostFree(pointer))


def test_registered_memory_is_reachable_until_unregistered() -> None:
    array = np.arange(1, 257, dtype=np.int32)
    address = array.ctypes.data
    with emulated("gfx942", report=0):
        function = _function("jump_table")
        arguments = Arguments(address, address, np.int32(256))
        check(hip.hipHostRegister(address, array.nbytes, 0))
        second = hip.hipHostRegister(address, array.nbytes, 0)
        assert second == (ERROR.hipErrorHostMemoryAlreadyRegistered,)
        launch(function, 1, 256, arguments)
        check(hip.hipDeviceSynchronize())
        assert array[7] == 24
        check(hip.hipHostUnregister(address))
        assert hip.hipHostUnregister(address) == (ERROR.hipErrorHostMemoryNotRegistered,)
        launch(function, 1, 256, arguments)
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorIllegalAddress,)


def test_pointer_attributes() -> None:
    with emulated("gfx942", 2), Buffers() as buffers:
        check(hip.hipSetDevice(1))
        pointer = buffers.empty(64)
        host = check(hip.hipHostMalloc(64, 0))
        of_device = check(hip.hipPointerGetAttributes(int(pointer) + 8))
        assert of_device.type == hip.hipMemoryType.hipMemoryTypeDevice and of_device.device == 1
        assert check(hip.hipPointerGetAttributes(host)).type == hip.hipMemoryType.hipMemoryTypeHost
        base, size = check(hip.hipMemGetAddressRange(int(pointer) + 8))
        assert (int(base), size) == (int(pointer), 64)


def test_peer_access_must_be_enabled() -> None:
    data = np.arange(256, dtype=np.int32)
    with emulated("gfx942", 2, report=0), Buffers() as buffers:
        there = buffers.upload(data)  # on device 0
        check(hip.hipSetDevice(1))
        function, out = _function("jump_table"), buffers.empty(data.nbytes)
        assert check(hip.hipDeviceCanAccessPeer(1, 0)) == 1
        assert check(hip.hipDeviceCanAccessPeer(1, 1)) == 0
        arguments = Arguments(there, out, np.int32(256))
        launch(function, 1, 256, arguments)
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorIllegalAddress,)
        check(hip.hipDeviceReset())
        check(hip.hipDeviceEnablePeerAccess(0, 0))
        twice = hip.hipDeviceEnablePeerAccess(0, 0)
        assert twice == (ERROR.hipErrorPeerAccessAlreadyEnabled,)
        assert hip.hipDeviceEnablePeerAccess(1, 0) == (ERROR.hipErrorInvalidDevice,)
        launch(function, 1, 256, arguments)
        check(hip.hipDeviceSynchronize())
        assert download(out, (256,), np.int32)[8] == 24
        copied = buffers.empty(data.nbytes)
        check(hip.hipMemcpyPeer(copied, 1, there, 0, data.nbytes))
        np.testing.assert_array_equal(download(copied, data.shape, data.dtype), data)
        check(hip.hipDeviceDisablePeerAccess(0))
        assert hip.hipDeviceDisablePeerAccess(0) == (ERROR.hipErrorPeerAccessNotEnabled,)


def test_out_of_bounds_is_named() -> None:
    with emulated("gfx942", report=0), Buffers() as buffers:
        x, out = buffers.upload(np.zeros(200, np.int32)), buffers.empty(1024)
        launch(_function("jump_table"), 1, 256, Arguments(x, out, np.int32(256)))
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorIllegalAddress,)
        (failure,) = failures()
        assert "jump_table" in failure.message and "seed" in failure.message
        # As on a GPU, the error persists until the device is reset.
        assert hip.hipDeviceSynchronize() == (ERROR.hipErrorIllegalAddress,)
        check(hip.hipDeviceReset())
        check(hip.hipDeviceSynchronize())


CHILD = """
import sys
import threading
import numpy as np
from ark_rocm_emulator import activate
activate("emulated:gfx942")
from hip import hip
from hip_runner import Arguments, check, code_object, download, launch
handle = hip.hipIpcMemHandle_t.fromObj(bytearray(bytes.fromhex(sys.argv[1])))
pointer = check(hip.hipIpcOpenMemHandle(handle, 1))
again = check(hip.hipIpcOpenMemHandle(handle, 1))
assert int(pointer) == int(again)
assert (download(pointer, (256,), np.int32) == np.arange(256)).all()
module = check(hip.hipModuleLoadData(code_object("elementwise.hip", "gfx942", ("-O3",))))
function = check(hip.hipModuleGetFunction(module, b"jump_table"))
launch(function, 1, 256, Arguments(pointer, pointer, np.int32(256)))
check(hip.hipDeviceSynchronize())
check(hip.hipIpcCloseMemHandle(pointer))
check(hip.hipIpcCloseMemHandle(again))
assert hip.hipIpcCloseMemHandle(again)[0] == hip.hipError_t.hipErrorInvalidValue
"""


def test_another_process_maps_device_memory() -> None:
    data = np.arange(256, dtype=np.int32)
    with emulated("gfx942"), Buffers() as buffers:
        buffers.empty(100)
        pointer = buffers.upload(data)
        handle = check(hip.hipIpcGetMemHandle(pointer))
        raw = ctypes.string_at(handle.as_c_void_p().value, 64)
        own = hip.hipIpcOpenMemHandle(handle, 1)[0]
        assert own == ERROR.hipErrorInvalidContext  # as in HIP: not in the process that exports
        path = os.pathsep.join([os.path.dirname(__file__), *(p for p in sys.path if p)])
        subprocess.run(
            [sys.executable, "-c", CHILD, raw.hex()],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=120,
        )
        seen = download(pointer, data.shape, data.dtype)
        assert seen[8] == 24 and seen[4] == -4


def test_host_memory_has_no_ipc_handle() -> None:
    with emulated("gfx942"):
        pointer = check(hip.hipHostMalloc(64, 0))
        assert hip.hipIpcGetMemHandle(pointer)[0] == ERROR.hipErrorInvalidDevicePointer


@pytest.mark.parametrize("flags", [0, 1, 3])
def test_device_memory_of_every_grain(flags: int) -> None:
    data = np.arange(256, dtype=np.int32)
    with emulated("gfx942"), Buffers() as buffers:
        pointer = buffers.upload(data, flags)
        np.testing.assert_array_equal(download(pointer, data.shape, data.dtype), data)
        assert hip.hipMemcpy(np.empty(4, np.uint8), pointer, 4, TO_HOST)[0] == ERROR.hipSuccess


def _count_and_allocate() -> None:
    assert check(hip.hipGetDeviceCount()) == 2
    with Buffers() as buffers:
        data = np.arange(10, dtype=np.int32)
        assert (download(buffers.upload(data), (10,), np.int32) == data).all()


def test_forked_child_starts_over() -> None:
    with emulated("gfx942", 2), Buffers() as buffers:
        buffers.upload(np.zeros(4, np.int32))
        child = multiprocessing.get_context("fork").Process(target=_count_and_allocate)
        child.start()
        child.join(60)
        assert child.exitcode == 0


def test_kernels_of_two_processes_put_signal_and_wait() -> None:
    assert exchange("gfx942", code_object("sync.hip", "gfx942", ("-O3",))) == []


UNTIL_TOLD = """
extern "C" __global__ void until_told(const unsigned* word) {
  while (__hip_atomic_load(word, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM) == 0)
    __builtin_amdgcn_s_sleep(1);
}
"""


@pytest.mark.parametrize("refused", [True, False])
def test_freeing_memory_under_a_kernel_waits_or_is_refused(refused: bool) -> None:
    with emulated("gfx942", 2, implicit_sync=0 if refused else 1, report=0):
        module = check(hip.hipModuleLoadData(compile_hip(UNTIL_TOLD, "gfx942")))
        function = check(hip.hipModuleGetFunction(module, b"until_told"))
        word, other = (check(hip.hipHostMalloc(4, 0x2)) for _ in range(2))
        host = (ctypes.c_uint32 * 1).from_address(int(word))
        host[0] = 0
        memory = check(hip.hipMalloc(64))
        check(hip.hipSetDevice(1))
        elsewhere = check(hip.hipMalloc(64))
        check(hip.hipSetDevice(0))
        stream = check(hip.hipStreamCreateWithFlags(1))
        launch(function, 1, 64, Arguments(int(word)), stream=stream)
        tell = threading.Timer(0.2, lambda: host.__setitem__(0, 1))
        check(hip.hipFree(elsewhere))  # no kernel runs there
        assert hip.hipStreamQuery(stream) == (ERROR.hipErrorNotReady,)
        if refused:
            for answer in (
                hip.hipFree(memory),
                hip.hipHostFree(other),
                hip.hipModuleUnload(module),
            ):
                assert answer == (ERROR.hipErrorNotReady,)
            assert [f.message.split()[0] for f in failures()] == [
                "hipFree",
                "hipHostFree",
                "hipModuleUnload",
            ]
            assert {f.kind.name for f in failures()} == {"UNDER_KERNEL"}
            host[0] = 1
            check(hip.hipStreamSynchronize(stream))
        else:
            tell.start()
        check(hip.hipFree(memory))
        assert host[0] == 1  # so hipFree waited until the kernel ended
        check(hip.hipHostFree(other))
        check(hip.hipModuleUnload(module))
        assert refused or failures() == []
