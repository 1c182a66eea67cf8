"""Runs kernels through the unmodified hip-python. All tests of the HIP stand-in use it.

It has thin helpers over HIP calls, which raise on an error code, and `run_case`, which does for a
case of the kernel suite what a program would do: load, allocate, copy in, launch, wait, copy out,
compare.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from ark_rocm_emulator import failures
from hip import hip
from kernel_cases import KERNELS, Case, Out, Target, Work, compare, three

from tests.kept import compile_hip

TO_DEVICE = hip.hipMemcpyKind.hipMemcpyHostToDevice
TO_HOST = hip.hipMemcpyKind.hipMemcpyDeviceToHost


class HipError(AssertionError):
    """A HIP call returned an error code. The message includes the emulator's report."""

    def __init__(self, code: Any) -> None:
        self.code = code
        messages = "\n".join(f.message for f in failures())
        super().__init__(f"{code.name}\n{messages}")


def check(answer: Any) -> Any:
    """Checks the answer of a HIP call. Returns the values after its error code (None, one value, or
    a tuple); raises HipError if it failed.
    """
    code, *values = answer if isinstance(answer, tuple) else (answer,)
    if int(code) != 0:
        raise HipError(code)
    return values[0] if len(values) == 1 else tuple(values) or None


@lru_cache(maxsize=512)
def code_object(source: str, arch: str, options: tuple[str, ...]) -> bytes:
    """Compiles one source file of the kernel suite; returns the code object."""
    return compile_hip((KERNELS / source).read_text(), arch, options)


class Buffers:
    """The device memory of one test. It is freed at the end of a `with` block."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def __enter__(self) -> Buffers:
        return self

    def __exit__(self, *_: object) -> None:
        for pointer in self.held:
            hip.hipFree(pointer)

    def empty(self, size: int, flags: int = 0) -> Any:
        """`size` bytes, uninitialised."""
        self.held.append(check(hip.hipExtMallocWithFlags(max(size, 1), flags)))
        return self.held[-1]

    def upload(self, array: np.ndarray, flags: int = 0) -> Any:
        """A copy of `array` on the device."""
        pointer = self.empty(array.nbytes, flags)
        if array.nbytes:
            data = np.ascontiguousarray(array).view(np.uint8).ravel()
            check(hip.hipMemcpy(pointer, data, array.nbytes, TO_DEVICE))
        return pointer


def download(pointer: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The device's memory at `pointer`, as an array."""
    raw = np.empty(int(np.prod(shape)) * np.dtype(dtype).itemsize, np.uint8)
    check(hip.hipMemcpy(raw, pointer, raw.nbytes, TO_HOST))
    return raw.view(dtype).reshape(shape)


class Arguments:
    """Kernel arguments in HIP's form: an array of pointers to their values."""

    def __init__(self, *values: Any) -> None:
        self.values = [self._place(v) for v in values]
        self.array = (ctypes.c_void_p * len(self.values))(
            *(ctypes.addressof(v) for v in self.values)
        )

    @staticmethod
    def _place(value: Any) -> Any:
        if isinstance(value, ctypes.Array):  # a structure by value
            return value
        if isinstance(value, np.generic):
            return (ctypes.c_char * value.itemsize).from_buffer_copy(value.tobytes())
        return ctypes.c_uint64(value if isinstance(value, int) else int(value))


def launch(
    function: Any,
    grid: Any,
    block: Any,
    arguments: Arguments,
    *,
    dynamic_lds: int = 0,
    stream: Any = None,
    cooperative: bool = False,
) -> None:
    """Starts a kernel. `grid` (in blocks) and `block` (in threads) are numbers or tuples."""
    shape = (*three(grid), *three(block), dynamic_lds, stream, arguments.array)
    if cooperative:
        check(hip.hipModuleLaunchCooperativeKernel(function, *shape))
    else:
        check(hip.hipModuleLaunchKernel(function, *shape, None))


def run_work(function: Any, case: Case, work: Work) -> dict[int, np.ndarray]:
    """Launches `case` with the arguments of `work`. Returns the contents of the arrays with
    expectations.
    """
    with Buffers() as buffers:
        placed: list[Any] = []
        for value in work.args:
            if isinstance(value, Out):
                size = int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize
                placed.append(buffers.empty(size))
            elif isinstance(value, np.ndarray):
                placed.append(buffers.upload(value))
            else:
                placed.append(value)
        launch(
            function,
            work.grid or case.grid,
            work.block or case.block,
            Arguments(*placed),
            dynamic_lds=case.dynamic_lds,
            cooperative=case.cooperative,
        )
        check(hip.hipDeviceSynchronize())
        after = {}
        for k in work.expected:
            after[k] = download(placed[k], work.args[k].shape, work.args[k].dtype)
        return after


def run_case(case: Case, arch: str, options: tuple[str, ...], seed: int) -> None:
    """Compiles and runs a case and compares its results. The data and the schedule follow from
    `seed`.
    """
    binary = code_object(case.source, arch, (*options, *case.options))
    module = check(hip.hipModuleLoadData(binary))
    function = check(hip.hipModuleGetFunction(module, case.name.encode()))
    work = case.make(np.random.default_rng(seed), Target(arch))
    compare(work, run_work(function, case, work))
    check(hip.hipModuleUnload(module))


def exchange_between_devices(binary: bytes, rounds: int = 5) -> None:
    """Runs sync.hip's `put_signal_wait` on two existing devices and compares the rows."""
    blocks, threads = 3, 64
    n = blocks * threads
    values = [np.arange(n, dtype=np.int32) * (rank + 1) for rank in range(2)]
    mine, inbox, flags, functions = [], [], [], []
    for rank in range(2):
        check(hip.hipSetDevice(rank))
        check(hip.hipDeviceEnablePeerAccess(1 - rank, 0))
        held = Buffers()  # lives as long as the devices
        mine.append(held.upload(values[rank]))
        inbox.append(held.empty(2 * n * 4, 3))
        flags.append(held.upload(np.zeros(blocks, np.uint32), 3))
        module = check(hip.hipModuleLoadData(binary))
        functions.append(check(hip.hipModuleGetFunction(module, b"put_signal_wait")))
    for rank in range(2):
        check(hip.hipSetDevice(rank))
        peer = 1 - rank
        numbers = np.int32(rank), np.int32(rounds)
        pointers = mine[rank], inbox[peer], flags[peer], inbox[rank], flags[rank]
        launch(functions[rank], blocks, threads, Arguments(*pointers, *numbers))
    for rank in range(2):
        check(hip.hipSetDevice(rank))
        check(hip.hipDeviceSynchronize())
    for r in range(1, rounds + 1):
        values = [values[1] + 1 + r, values[0] + 0 + r]
    for rank in range(2):
        np.testing.assert_array_equal(download(mine[rank], (n,), np.int32), values[rank])
