"""The suite's kernels that synchronise, compiled through the shim and run on an NVIDIA GPU.

Several blocks at once under a real weak memory model: what a missing fence does there, no emulation
shows. Runs where there is a GPU; ARK_REQUIRE=cuda:1 makes its absence a failure. ARK_SHIM_ROUNDS is
how often each kernel runs (20).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import kernel_cases
import numpy as np
import pytest
from ark_rocm_emulator.shim import compile_cubin
from hip_runner import compare
from kernel_cases import KERNELS, Case, Out, Target, Work, three

SOURCES = ("sync.hip", "scan.hip", "histogram.hip")
CASES = {
    name: case
    for name, case in kernel_cases.load_all().items()
    if case.source in SOURCES and "gfx1100" in case.archs
}
ROUNDS = int(os.environ.get("ARK_SHIM_ROUNDS", "20"))
LANES_OF_32 = Target("gfx1100")  # a warp is as wide as a wave of RDNA3


def _absent() -> str:
    """Why no GPU can be used here; empty if one can."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        return f"cuda-python is not installed ({error})"
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:
        return f"the CUDA driver cannot be loaded ({error})"
    return "" if int(code) == 0 else f"cuInit answers {code.name}"


REASON = _absent()
if REASON and not os.environ.get("ARK_REQUIRE", "").startswith("cuda"):
    pytest.skip(f"no NVIDIA GPU: {REASON}", allow_module_level=True)


def call(name: str, *arguments: Any) -> Any:
    """The value of a driver call that must succeed."""
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    assert int(code) == 0, f"{name}: {code.name}"
    return values[0] if len(values) == 1 else tuple(values) or None


@cache
def device() -> str:
    """Makes the first GPU current; its architecture, such as "sm_90"."""
    from cuda.bindings import driver

    assert not REASON, f"a GPU was promised: {REASON}"
    handle = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", handle))
    names = driver.CUdevice_attribute
    major, minor = (
        call("cuDeviceGetAttribute", attribute, handle)
        for attribute in (
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return f"sm_{major}{minor}"


@cache
def module(source: str) -> Any:
    arch = device()
    cubin = compile_cubin((KERNELS / source).read_text(), arch, ("--fmad=false",))
    return call("cuModuleLoadData", cubin)


@contextmanager
def memory(sizes: list[int]) -> Iterator[list[int]]:
    """Device memory of these sizes, filled with 0xCB."""
    held = [call("cuMemAlloc", max(size, 1)) for size in sizes]
    try:
        for pointer, size in zip(held, sizes, strict=True):
            call("cuMemsetD8", pointer, 0xCB, max(size, 1))
        yield [int(pointer) for pointer in held]
    finally:
        for pointer in held:
            call("cuMemFree", pointer)


def run(case: Case, work: Work) -> dict[int, np.ndarray]:
    """One launch; what the expected arguments hold after it."""
    function = call("cuModuleGetFunction", module(case.source), case.name.encode())
    arrays = {k: v for k, v in enumerate(work.args) if isinstance(v, np.ndarray | Out)}
    sizes = [int(np.prod(a.shape)) * np.dtype(a.dtype).itemsize for a in arrays.values()]
    with memory(sizes) as pointers:
        places = dict(zip(arrays, pointers, strict=True))
        values: list[Any] = []
        kinds: list[Any] = []
        for k, argument in enumerate(work.args):
            if k in places:
                if isinstance(argument, np.ndarray) and argument.nbytes:
                    data = np.ascontiguousarray(argument)
                    call("cuMemcpyHtoD", places[k], data.ctypes.data, data.nbytes)
                values.append(places[k])
                kinds.append(ctypes.c_void_p)
            else:
                values.append(argument.item())
                kinds.append(np.ctypeslib.as_ctypes_type(argument.dtype))
        shape = *three(work.grid or case.grid), *three(work.block or case.block)
        launch = (function, *shape, case.dynamic_lds, 0, (tuple(values), tuple(kinds)))
        if case.cooperative:
            call("cuLaunchCooperativeKernel", *launch)
        else:
            call("cuLaunchKernel", *launch, 0)
        call("cuCtxSynchronize")
        after = {}
        for k in work.expected:
            after[k] = np.empty(work.args[k].shape, work.args[k].dtype)
            call("cuMemcpyDtoH", after[k].ctypes.data, places[k], after[k].nbytes)
        return after


@pytest.mark.parametrize("name", sorted(CASES))
def test_on_a_gpu(name: str) -> None:
    for seed in range(ROUNDS):
        work = CASES[name].make(np.random.default_rng(seed), LANES_OF_32)
        compare(work, run(CASES[name], work))
