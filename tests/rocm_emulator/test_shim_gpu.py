"""Runs the suite's kernels that synchronise on an NVIDIA GPU, through the shim.

The same HIP source that runs on the emulator runs here under a real weak memory model, in several
blocks at once. This tests the protocols and nothing of AMD's code generation. Without a GPU these
tests are skipped, or fail if ARK_REQUIRE=cuda:1 is set.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ark_rocm_emulator.shim import compile_ptx
from kernel_cases import KERNELS, Out, Target, Work, compare, load_all

driver = pytest.importorskip("cuda.bindings.driver")

CASES = {
    name: case
    for name, case in load_all().items()
    if case.source in ("sync.hip", "scan.hip", "histogram.hip") and "gfx1100" in case.archs
}
LITMUS_ROUNDS = 20


def ok(answer: tuple[Any, ...]) -> Any:
    """Checks the answer of a CUDA driver call. Returns the values after its error code."""
    assert int(answer[0]) == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]


@pytest.fixture(scope="module")
def context() -> Iterator[None]:
    """Creates a context on the first GPU."""
    try:
        usable = int(driver.cuInit(0)[0]) == 0
    except RuntimeError:
        usable = False
    if not usable:
        if "cuda" in os.environ.get("ARK_REQUIRE", ""):
            pytest.fail("ARK_REQUIRE promises an NVIDIA GPU, but the driver finds none")
        pytest.skip("no NVIDIA GPU")
    device = ok(driver.cuDeviceGet(0))
    ok(driver.cuCtxSetCurrent(ok(driver.cuDevicePrimaryCtxRetain(device))))
    yield
    driver.cuDevicePrimaryCtxRelease(device)


def extent(value: Any) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return (*given, *(1,) * (3 - len(given)))


def run(function: Any, case: Any, work: Work) -> dict[int, np.ndarray]:
    """Runs one cooperative launch (all blocks are resident). Returns the contents of the arguments
    with expectations.
    """
    placed: list[Any] = []
    held = []
    for value in work.args:
        if isinstance(value, np.generic):
            placed.append((ctypes.c_char * value.itemsize).from_buffer_copy(value.tobytes()))
            continue
        size = int(np.prod(value.shape)) * np.dtype(value.dtype).itemsize
        pointer = ok(driver.cuMemAlloc(max(size, 1)))
        held.append(pointer)
        if not isinstance(value, Out) and size:
            data = np.ascontiguousarray(value)
            ok(driver.cuMemcpyHtoD(pointer, data.ctypes.data, size))
        placed.append(ctypes.c_uint64(int(pointer)))
    array = (ctypes.c_void_p * len(placed))(*(ctypes.addressof(p) for p in placed))
    shape = (*extent(work.grid or case.grid), *extent(work.block or case.block))
    ok(
        driver.cuLaunchCooperativeKernel(
            function, *shape, case.dynamic_lds, 0, ctypes.addressof(array)
        )
    )
    ok(driver.cuCtxSynchronize())
    after = {}
    for k in work.expected:
        raw = np.empty(work.args[k].shape, work.args[k].dtype)
        ok(driver.cuMemcpyDtoH(raw.ctypes.data, placed[k].value, raw.nbytes))
        after[k] = raw
    for pointer in held:
        driver.cuMemFree(pointer)
    return after


@pytest.mark.parametrize("name", sorted(CASES))
def test_kernel(name: str, context: None) -> None:
    case = CASES[name]
    ptx = compile_ptx((KERNELS / case.source).read_text())
    module = ok(driver.cuModuleLoadData(ptx.encode() + b"\0"))
    function = ok(driver.cuModuleGetFunction(module, case.name.encode()))
    for seed in range(LITMUS_ROUNDS):
        work = case.make(np.random.default_rng(seed), Target("gfx1100"))
        compare(work, run(function, case, work))
    ok(driver.cuModuleUnload(module))
