"""HIP calls with invalid arguments: each returns HIP's error code and changes nothing."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from ark_rocm_emulator import emulated, failures
from hip import hip
from hip_runner import TO_DEVICE, TO_HOST, Arguments, check, code_object

ERROR = hip.hipError_t
GARBAGE_ADDRESS = 0xDEAD000
PAGE = mmap.PAGESIZE


@pytest.fixture(scope="module", autouse=True)
def device() -> Iterator[None]:
    with emulated("gfx942"):
        yield


def _function(name: str = "jump_table", source: str = "elementwise.hip"):
    module = check(hip.hipModuleLoadData(code_object(source, "gfx942", ("-O3",))))
    return check(hip.hipModuleGetFunction(module, name.encode()))


def _answer(result: object) -> object:
    return result[0] if isinstance(result, tuple) else result


@cache
def _forbidden() -> tuple[int, mmap.mmap]:
    """An inaccessible page of this process, and the object that owns it."""
    held = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 0) == 0
    return address, held


def test_sizes_that_wrap_around() -> None:
    pointer, host = check(hip.hipMalloc(4 * PAGE)), np.zeros(64, np.uint8)
    kept = check(hip.hipMalloc(4 * PAGE))
    invalid, memory = ERROR.hipErrorInvalidValue, ERROR.hipErrorOutOfMemory
    for size in (2**64 - 1, 2**64 - int(pointer), 2**63):
        assert _answer(hip.hipMemcpy(pointer, host, size, TO_DEVICE)) == invalid
        assert _answer(hip.hipMemset(pointer, 0, size)) == invalid
    for count in (2**62, 2**62 + 1, 2**63):
        assert _answer(hip.hipMemsetD32(pointer, 0, count)) == invalid
    for size in (2**64 - 1, 2**64 - PAGE, 2**64 - 2 * PAGE, 2**64 - 8 * PAGE):
        assert _answer(hip.hipMalloc(size)) == memory
        assert _answer(hip.hipHostMalloc(size, 0)) == memory
    check(hip.hipFree(kept))
    check(hip.hipFree(pointer))


def test_pointers_to_nothing() -> None:
    invalid, host = ERROR.hipErrorInvalidValue, np.zeros(64, np.uint8)
    pointer = check(hip.hipMalloc(64))
    for nothing in (GARBAGE_ADDRESS, _forbidden()[0], 2**64 - 8):
        assert _answer(hip.hipMemcpy(pointer, nothing, 64, TO_DEVICE)) == invalid
        assert _answer(hip.hipMemcpy(nothing, pointer, 64, TO_HOST)) == invalid
        assert _answer(hip.hipMemcpy(nothing, host, 64, TO_DEVICE)) == invalid
        assert _answer(hip.hipMemset(nothing, 0, 64)) == invalid
        assert _answer(hip.hipFree(nothing)) == invalid
        assert _answer(hip.hipHostFree(nothing)) == invalid
        assert _answer(hip.hipHostRegister(nothing, 64, 0)) == invalid
        assert _answer(hip.hipModuleLoadData(nothing)) == ERROR.hipErrorInvalidImage
    # Makes the second of two pages inaccessible; the first stays readable.
    held = mmap.mmap(-1, 2 * PAGE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(held))
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(first + PAGE), ctypes.c_size_t(PAGE), 0) == 0
    big = check(hip.hipMalloc(2 * PAGE))
    assert _answer(hip.hipMemcpy(big, first, PAGE, TO_DEVICE)) == ERROR.hipSuccess
    assert _answer(hip.hipMemcpy(big, first, PAGE + 1, TO_DEVICE)) == invalid
    assert _answer(hip.hipHostRegister(first, 2 * PAGE, 0)) == invalid
    check(hip.hipFree(big))
    check(hip.hipFree(pointer))


def test_freed_twice_and_by_the_wrong_call() -> None:
    invalid = ERROR.hipErrorInvalidValue
    pointer, host = check(hip.hipMalloc(64)), check(hip.hipHostMalloc(64, 0))
    assert _answer(hip.hipFree(int(pointer) + 8)) == invalid
    assert _answer(hip.hipFree(host)) == invalid
    assert _answer(hip.hipHostFree(pointer)) == invalid
    check(hip.hipFree(pointer))
    check(hip.hipHostFree(host))
    assert _answer(hip.hipFree(pointer)) == invalid
    assert _answer(hip.hipHostFree(host)) == invalid


def test_handles_that_are_gone_or_never_were() -> None:
    handle = ERROR.hipErrorInvalidHandle
    module = check(hip.hipModuleLoadData(code_object("elementwise.hip", "gfx942", ("-O3",))))
    function = check(hip.hipModuleGetFunction(module, b"jump_table"))
    assert _answer(hip.hipModuleGetFunction(module, b"no_such")) == ERROR.hipErrorNotFound
    assert _answer(hip.hipModuleGetFunction(module, b"")) == ERROR.hipErrorInvalidValue
    assert _answer(hip.hipModuleGetGlobal(module, b"no_such")) == ERROR.hipErrorNotFound
    check(hip.hipModuleUnload(module))
    assert _answer(hip.hipModuleUnload(module)) == handle
    assert _answer(hip.hipModuleGetFunction(module, b"jump_table")) == handle
    launched = hip.hipModuleLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, None, None, None)
    assert _answer(launched) == handle
    stream, event = check(hip.hipStreamCreate()), check(hip.hipEventCreate())
    check(hip.hipStreamDestroy(stream))
    check(hip.hipEventDestroy(event))
    assert _answer(hip.hipStreamDestroy(stream)) == handle
    assert _answer(hip.hipStreamSynchronize(stream)) == handle
    assert _answer(hip.hipEventRecord(event, None)) == handle
    assert _answer(hip.hipEventDestroy(event)) == handle


# Each launch by name: its grid, block and LDS bytes, and HIP's error code. The products of the
# sizes would exceed 2^64.
LAUNCHES = {
    "no blocks": ((1, 0, 1), (64, 1, 1), 0, ERROR.hipErrorInvalidValue),
    "no lanes": ((1, 1, 1), (64, 1, 0), 0, ERROR.hipErrorInvalidConfiguration),
    "wrapping block": ((1, 1, 1), (320, 107367629, 536903681), 0, ERROR.hipErrorInvalidValue),
    "wrapping to none": ((1, 1, 1), (2**22, 2**21, 2**21), 0, ERROR.hipErrorInvalidValue),
    "wrapping grid": (
        (2**31 - 1, 65536, 65536),
        (1024, 1, 1),
        0,
        ERROR.hipErrorInvalidConfiguration,
    ),
    "grid too high": ((1, 65537, 1), (64, 1, 1), 0, ERROR.hipErrorInvalidValue),
    "grid too wide": ((2**31, 1, 1), (1, 1, 1), 0, ERROR.hipErrorInvalidValue),
    "too many lanes": ((1, 1, 1), (1025, 1, 1), 0, ERROR.hipErrorInvalidValue),
    "too much LDS": ((1, 1, 1), (64, 1, 1), 65537, ERROR.hipErrorInvalidValue),
    "all the LDS of the world": ((1, 1, 1), (64, 1, 1), 2**32 - 1, ERROR.hipErrorInvalidValue),
}


@pytest.mark.parametrize("name", list(LAUNCHES))
def test_launches_of_invalid_shapes_are_errors(name: str) -> None:
    grid, block, lds, expected = LAUNCHES[name]
    pointer = check(hip.hipMalloc(64 * 4))
    arguments = Arguments(pointer, pointer, np.int32(64))
    shape = (*grid, *block, lds, None, arguments.array, None)
    assert _answer(hip.hipModuleLaunchKernel(_function(), *shape)) == expected
    check(hip.hipFree(pointer))
    assert failures() == []


def test_grid_that_cannot_be_kept_in_memory() -> None:
    """A grid of 2^30 workgroups is refused with an error: workgroups may wait for each other, so
    all must be resident, and the host lacks the memory for them.
    """
    with emulated("gfx942"):
        pointer = check(hip.hipMalloc(1 << 16))
        arguments = Arguments(pointer, pointer, pointer, np.int32(1))
        function = _function("ring_exchange", "sync.hip")
        shape = (2**22 - 1, 256, 1, 64, 1, 1, 0, None, arguments.array, None)
        check(hip.hipModuleLaunchKernel(function, *shape))
        assert _answer(hip.hipDeviceSynchronize()) == ERROR.hipErrorLaunchFailure
        assert "more than this machine has" in failures()[-1].message


def test_occupancy_of_invalid_arguments() -> None:
    function = _function()
    ask = hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
    assert check(ask(function, 64, 2**64 - 1)) == 0
    assert check(ask(function, 2**31 - 1, 0)) == 0
    assert _answer(ask(function, -1, 0)) == ERROR.hipErrorInvalidValue


def test_unknown_ipc_handles_are_refused() -> None:
    handle = hip.hipIpcMemHandle_t()
    assert _answer(hip.hipIpcOpenMemHandle(handle, 1)) == ERROR.hipErrorInvalidValue
    pointer = check(hip.hipHostMalloc(64, 0))
    wrong = ERROR.hipErrorInvalidDevicePointer
    assert _answer(hip.hipIpcGetMemHandle(pointer)) == wrong
    check(hip.hipHostFree(pointer))
    assert _answer(hip.hipIpcCloseMemHandle(pointer)) == ERROR.hipErrorInvalidValue


def test_registered_memory_that_went_away() -> None:
    """Host memory that was registered and then unmapped stays registered. If the system later gives
    the same addresses to new pinned memory, its allocation fails with the error that they are
    registered already.
    """
    held = mmap.mmap(-1, 64 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    check(hip.hipHostRegister(address, 64 * PAGE, 0))
    second = hip.hipHostRegister(address + PAGE, PAGE, 0)
    assert _answer(second) == ERROR.hipErrorHostMemoryAlreadyRegistered
    held.close()
    answer, *pointer = hip.hipHostMalloc(64 * PAGE, 0)
    known = (ERROR.hipSuccess, ERROR.hipErrorHostMemoryAlreadyRegistered)
    assert answer in known
    if answer == ERROR.hipSuccess:
        check(hip.hipHostFree(pointer[0]))
    check(hip.hipHostUnregister(address))
    unregistered = ERROR.hipErrorHostMemoryNotRegistered
    assert _answer(hip.hipHostUnregister(address)) == unregistered
