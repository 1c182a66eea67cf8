"""Wait states around matrix instructions: with the number of wait states in the tables nothing is
reported, with one fewer the hazard is.

The hand-written rows have the numbers of AMD's CDNA2, CDNA3 and CDNA4 instruction set documents
("Dependency resolution: required independent instructions"). In addition, clang's output is used:
clang emits exactly as many `s_nop` as are needed, so its code must pass, and must fail with one
fewer.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from isa_program import Case, Suite

from tests.kept import assemble, to_assembly

CDNA = ("gfx90a", "gfx942", "gfx950")

SMALL = "v_mfma_f32_4x4x4f16 {d}, v[10:11], v[12:13], {c}"  # four registers of result
MIDDLE = "v_mfma_f32_16x16x16f16 {d}, v[10:11], v[12:13], {c}"
LARGE = "v_mfma_f32_32x32x8f16 {d}, v[10:11], v[12:13], {c}"
SINGLE = "v_mfma_f32_16x16x4f32 {d}, v10, v12, {c}"  # not of the units for small types
DOUBLE = "v_mfma_f64_4x4x4f64 {d}, v[10:11], v[12:13], {c}"
READ = "v_mov_b32_e32 v100, v40"
STORE = "ds_write_b32 v14, v40"
WRITE = "v_mov_b32_e32 v40, 0"
OVER_C = "v_mov_b32_e32 v64, 0"
AS_A = "v_mfma_f32_16x16x16f16 v[68:71], v[40:41], v[12:13], 0"
AS_C = "v_mfma_f32_16x16x16f16 v[40:43], v[10:11], v[12:13], v[40:43]"
OTHER_C = "v_mfma_f32_16x16x16f16 v[68:71], v[10:11], v[12:13], v[42:45]"


def first(text: str, registers: int, c: str = "0") -> str:
    return text.format(d=f"v[40:{39 + registers}]", c=c)


# By the hazard's name: the two instructions, and the wait states between them on gfx90a, gfx942 and
# gfx950.
TABLE = {
    "small result read": (first(SMALL, 4), READ, 5, 5, 5),
    "middle result read": (first(MIDDLE, 4), READ, 11, 7, 8),
    "large result read": (first(LARGE, 16), READ, 19, 11, 12),
    "single result read": (first(SINGLE, 4), READ, 11, 10, 10),
    "double result read": (first(DOUBLE, 2), READ, 6, 6, 6),
    "double result stored": (first(DOUBLE, 2), STORE, 9, 9, 9),
    "large result stored": (first(LARGE, 16), STORE, 19, 11, 12),
    "middle result overwritten": (first(MIDDLE, 4), WRITE, 11, 7, 8),
    "large result as A": (first(LARGE, 16), AS_A, 19, 11, 12),
    "middle result as A": (first(MIDDLE, 4), AS_A, 11, 7, 8),
    "single result as A": (first(SINGLE, 4), AS_A, 11, 10, 10),
    "middle result as C": (first(MIDDLE, 4), AS_C, 0, 0, 0),
    "small result as C": (first(SMALL, 4), AS_C, 0, 2, 2),
    "middle result within C": (first(MIDDLE, 4), OTHER_C, 8, 5, 6),
    "large result within C": (first(LARGE, 16), OTHER_C, 16, 9, 10),
    "middle C overwritten": (first(MIDDLE, 4, "v[64:67]"), OVER_C, 7, 3, 3),
    "large C overwritten": (first(LARGE, 16, "v[64:79]"), OVER_C, 15, 7, 7),
    "operand just written": ("v_mov_b32_e32 v10, 0", first(MIDDLE, 4), 2, 2, 2),
    "lanes just switched": ("v_cmpx_eq_u32_e32 v10, v10", first(MIDDLE, 4), 4, 4, 4),
    "dot product read": ("v_dot2_f32_f16 v40, v10, v11, v12", READ, 3, 3, 3),
}


def wait(states: int) -> str:
    whole, rest = divmod(states, 16)
    return "\n".join(["s_nop 15"] * whole + [f"s_nop {rest - 1}"] * (rest > 0))


def _suite(arch: str) -> Suite:
    cases = {}
    for name, (before, after, *needs) in TABLE.items():
        need = needs[CDNA.index(arch)]
        for kind, states in (("enough", need), ("short", need - 1)):
            if states < 0:
                continue
            body = f"s_nop 15\ns_nop 15\n{before}\n{wait(states)}\n{after}\ns_nop 15\ns_nop 15"
            cases[f"{name}_{kind}".replace(" ", "_")] = Case(body, 8, 16)
    return Suite(arch, cases)


SUITES = {arch: _suite(arch) for arch in CDNA}


def run(arch: str, name: str, kind: str, checks: bool = True) -> None:
    rows = [np.full(64, k, np.uint32) for k in range(8)]
    SUITES[arch].run(f"{name}_{kind}".replace(" ", "_"), rows, checks=checks)


@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize("name", TABLE)
def test_enough_wait_states_raise_no_alarm(name: str, arch: str) -> None:
    run(arch, name, "enough")


NEEDED = [
    (name, arch)
    for name, (_, _, *needs) in TABLE.items()
    for arch, need in zip(CDNA, needs, strict=True)
    if need > 0
]


@pytest.mark.parametrize(("name", "arch"), NEEDED)
def test_one_wait_state_too_few_is_found(name: str, arch: str) -> None:
    with pytest.raises(AssertionError, match="wait states after"):
        run(arch, name, "short")
    run(arch, name, "short", checks=False)


SOURCE = """
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef float float16 __attribute__((ext_vector_type(16)));
typedef double double4 __attribute__((ext_vector_type(4)));
extern "C" __global__ void middle(const half4* a, float4* out) {
  const int l = threadIdx.x;
  out[l] = __builtin_amdgcn_mfma_f32_16x16x16f16(a[l], a[l + 64], float4{}, 0, 0, 0);
}
extern "C" __global__ void large(const half4* a, float16* out) {
  const int l = threadIdx.x;
  out[l] = __builtin_amdgcn_mfma_f32_32x32x8f16(a[l], a[l + 64], float16{}, 0, 0, 0);
}
extern "C" __global__ void chain(const half4* a, float4* out) {
  const int l = threadIdx.x;
  float4 sum = __builtin_amdgcn_mfma_f32_16x16x16f16(a[l], a[l + 64], float4{}, 0, 0, 0);
  half4 again;
  for (int k = 0; k < 4; k++) again[k] = (_Float16)sum[k];
  out[l] = __builtin_amdgcn_mfma_f32_16x16x16f16(again, a[l], sum, 0, 0, 0);
}
extern "C" __global__ void doubles(const double* a, double4* out) {
  const int l = threadIdx.x;
  out[l] = __builtin_amdgcn_mfma_f64_16x16x4f64(a[l], a[l + 64], double4{}, 0, 0, 0);
}
"""
KERNELS = ("middle", "large", "chain", "doubles")


def run_compiled(assembly: str, arch: str, kernel: str) -> str:
    """Runs a kernel given as assembler text. Returns the message of the checks; empty if
    they pass.
    """
    machine = core().Machine([arch])
    code = machine.load(core().CodeObject(assemble(assembly, arch)), 0)
    source, target = (machine.allocate(0, "device", 4096, name) for name in ("in", "out"))
    machine.write(source, bytes(4096))
    options = core().LaunchOptions(seed=1, checks=True, step_budget=100_000)
    arguments = np.array([source, target], np.uint64).tobytes()
    launch = core().LaunchDesc(code, kernel, (1, 1, 1), (64, 1, 1), arguments, 0, options)
    return machine.run(launch).message


@pytest.mark.parametrize("arch", CDNA)
@pytest.mark.parametrize("kernel", KERNELS)
def test_wait_states_of_clang_are_minimal(kernel: str, arch: str) -> None:
    assembly, _ = to_assembly(SOURCE, arch, ("-O3",))
    assert run_compiled(assembly, arch, kernel) == ""
    begin = assembly.index(f"\n{kernel}:")
    end = assembly.index("s_endpgm", begin)
    body = assembly[begin:end]
    # The last `s_nop` before an instruction that touches a product's result.
    nops = [m for m in re.finditer(r"s_nop (\d+)\n", body) if "mfma" in body[: m.start()]]
    assert nops, body
    at = nops[-1]
    fewer = f"s_nop {int(at[1]) - 1}\n" if int(at[1]) > 0 else "\n"
    broken = assembly[: begin + at.start()] + fewer + assembly[begin + at.end() :]
    assert "wait states after" in run_compiled(broken, arch, kernel)
