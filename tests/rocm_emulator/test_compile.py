"""The compiler call for HIP sources without headers: it gives the same bytes each time, and the
error contains clang's own message if clang refuses the source.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from ark_rocm_emulator.compile import (
    TARGETS,
    CompileError,
    assemble,
    compile_hip,
    to_assembly,
    to_code,
    toolchain,
)
from ark_rocm_emulator.engine import core

from ark.errors import SystemError

KERNEL = """
__constant__ float table[4] = {1, 2, 3, 4};
extern "C" __global__ __launch_bounds__(128) void scale(float* x) {
  x[blockIdx.x * blockDim.x + threadIdx.x] *= table[threadIdx.x & 3];
}
"""


def _loaded(code: bytes) -> list[bytes]:
    """Returns the segments of an ELF file that are loaded to a device, without the file's
    header.
    """
    start, count = struct.unpack_from("<Q", code, 32)[0], struct.unpack_from("<H", code, 56)[0]
    headers = [struct.unpack_from("<IIQQQQ", code, start + 56 * i) for i in range(count)]
    return [code[max(at, 64) : at + size] for kind, _, at, _, _, size in headers if kind == 1]


@pytest.mark.parametrize("arch", TARGETS)
def test_same_source_gives_the_same_bytes(arch: str) -> None:
    first, second = compile_hip(KERNEL, arch), compile_hip(KERNEL, arch)
    assert first == second
    assert first[:4] == b"\x7fELF" and b"scale.kd" in first


@pytest.mark.parametrize("arch", TARGETS)
def test_code_object_equals_the_assembly(arch: str) -> None:
    """Compiling directly and by way of assembly give the same instructions, descriptor and notes.
    So the lint, which reads the assembly, examines the code that runs.
    """
    direct, through = compile_hip(KERNEL, arch), assemble(to_assembly(KERNEL, arch)[0], arch)
    listings = [core().CodeObject(code).disassemble() for code in (direct, through)]
    assert listings[0] == listings[1] and "s_endpgm" in listings[0]
    assert _loaded(direct) == _loaded(through)


def test_options_and_headers_reach_clang() -> None:
    source = '#include "part/value.h"\nextern "C" __global__ void f(int* x) { *x = VALUE + MORE; }'
    headers = [("part/value.h", "#define VALUE 1200\n")]
    text, messages = to_assembly(source, "gfx942", ("-O3", "-DMORE=34"), headers=headers)
    assert "0x4d2" in text and messages == ""
    code, _ = to_code(source, "gfx942", ("-O3", "-DMORE=34"), headers)
    assert "0x4d2" in core().CodeObject(code).disassemble()


def test_launch_bounds_reach_the_code_object() -> None:
    text, _ = to_assembly(KERNEL, "gfx1100")
    assert ".max_flat_workgroup_size: 128" in text and ".wavefront_size: 32" in text


def test_size_of_waves_reaches_the_assembler() -> None:
    """The assembler is told the wave size: comparisons in waves of 64 lanes write two scalar
    registers.
    """
    source = """extern "C" __global__ void f(unsigned long long* x) {
      x[threadIdx.x] = __builtin_amdgcn_ballot_w64(x[threadIdx.x] > 5);
    }"""
    code = compile_hip(source, "gfx1100", ("-O3", "-mwavefrontsize64"))
    assert core().CodeObject(code).kernels[0].wave_size == 64


def test_refused_program_comes_with_its_diagnostics() -> None:
    with pytest.raises(CompileError, match=r"compiling HIP for gfx942 failed[\s\S]*nonsense"):
        compile_hip('extern "C" __global__ void f() { nonsense; }', "gfx942")
    with pytest.raises(CompileError, match="assembling for gfx1100 failed"):
        assemble("v_no_such_instruction v0\n", "gfx1100")


def test_compiler_named_by_the_environment_must_be_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ARK_ROCM_CLANG", str(tmp_path / "clang"))
    monkeypatch.setenv("ARK_ROCM_LLD", str(tmp_path / "ld.lld"))
    toolchain.cache_clear()
    try:
        with pytest.raises(SystemError, match="ARK_ROCM_CLANG"):
            compile_hip(KERNEL, "gfx942")
    finally:
        toolchain.cache_clear()
