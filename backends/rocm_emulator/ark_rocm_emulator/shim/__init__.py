"""Compiles device source of the ROCm dialect for an NVIDIA GPU, through NVRTC and a header.

Synchronisation tests normally run their device code on the emulator. With this package the tests
run the same code on hardware with a weak memory model. The header hip_on_nvrtc.h maps AMD's
compiler builtins to NVIDIA's. This module runs the compiler.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ark.errors import SystemError

from ..compile import CompileError

HEADER = Path(__file__).parent / "hip_on_nvrtc.h"


@lru_cache(maxsize=1)
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise SystemError(
            "The bindings of NVRTC were not found. Expected the package cuda-python with "
            "nvidia-cuda-nvrtc. Install it: pip install 'ark-gpu[cuda]'."
        ) from None
    return nvrtc


def _checked(answer: tuple[Any, ...], step: str) -> Any:
    nvrtc = _nvrtc()
    code, values = answer[0], answer[1:]
    if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed at {step}: {code.name}.")
    return values[0] if values else None


def compile_ptx(source: str, arch: str = "sm_90", options: Sequence[str] = ()) -> str:
    """Compiles HIP device source to PTX text.

    Args:
        source: HIP C++ device code without #include.
        arch: "sm_90" or another real architecture of NVRTC.
        options: further options for NVRTC, such as "-DNAME=value".

    Raises:
        CompileError: the compilation failed. The message contains NVRTC's log.
        SystemError: NVRTC is not installed.
    """
    nvrtc = _nvrtc()
    whole = f'#line 1 "{HEADER.name}"\n{HEADER.read_text()}\n#line 1 "kernel.hip"\n{source}'
    program = _checked(
        nvrtc.nvrtcCreateProgram(whole.encode(), b"kernel.hip", 0, [], []), "creating a program"
    )
    try:
        words = [f"--gpu-architecture={arch}", "-std=c++17", *options]
        encoded = [word.encode() for word in words]
        code = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
        if code != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            size = _checked(nvrtc.nvrtcGetProgramLogSize(program), "reading its log")
            log = b" " * size
            _checked(nvrtc.nvrtcGetProgramLog(program, log), "reading its log")
            message = log.decode(errors="replace").rstrip("\0 \n")
            raise CompileError(f"NVRTC cannot compile the source for {arch}:\n{message}")
        ptx = b" " * _checked(nvrtc.nvrtcGetPTXSize(program), "reading the result")
        _checked(nvrtc.nvrtcGetPTX(program, ptx), "reading the result")
        return str(ptx.decode()).rstrip("\0")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
