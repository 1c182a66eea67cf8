"""A shim lets NVRTC compile AMD device source for NVIDIA GPUs. The resulting instructions have the
memory orders and scopes that the source requests.

The PTX is compared with the PTX instruction set's notation for order and scope. It is compiled, not
run.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ark_rocm_emulator.compile import CompileError
from ark_rocm_emulator.shim import compile_ptx

from tests.cases.shim import fences

pytest.importorskip("cuda.bindings.nvrtc")


def atomic(statement: str) -> list[str]:
    """The memory-model instructions in the PTX of a kernel with this one statement."""
    source = f"""
    extern "C" __global__ void k(unsigned* p, unsigned long long* w, unsigned* out) {{
      unsigned expected = 7;
      {statement}
      out[0] = expected;
    }}"""
    ptx = compile_ptx(source)
    return re.findall(r"\b(?:(?:ld|st|atom|red)\.\S*(?:sys|gpu|cta)\S*|fence\.\S+)", ptx)


CASES = [
    ("__hip_atomic_store(p, 1u, {})", "RELEASE", "SYSTEM", "st.release.sys.b32"),
    ("__hip_atomic_store(p, 1u, {})", "RELAXED", "AGENT", "st.relaxed.gpu.b32"),
    ("expected = __hip_atomic_load(p, {})", "ACQUIRE", "SYSTEM", "ld.acquire.sys.b32"),
    ("expected = __hip_atomic_load(p, {})", "ACQUIRE", "AGENT", "ld.acquire.gpu.b32"),
    ("expected = __hip_atomic_load(w, {})", "RELAXED", "SYSTEM", "ld.relaxed.sys.b64"),
    (
        "expected = __hip_atomic_fetch_add(p, 2u, {})",
        "ACQ_REL",
        "AGENT",
        "atom.add.acq_rel.gpu.u32",
    ),
    (
        "expected = __hip_atomic_fetch_max(p, 2u, {})",
        "RELAXED",
        "SYSTEM",
        "atom.max.relaxed.sys.u32",
    ),
    (
        "expected = __hip_atomic_exchange(p, 2u, {})",
        "ACQUIRE",
        "AGENT",
        "atom.exch.acquire.gpu.b32",
    ),
    (
        "__hip_atomic_compare_exchange_strong(p, &expected, 3u, {0}, __ATOMIC_RELAXED, {1})",
        "RELEASE",
        "WORKGROUP",
        "atom.cas.release.cta.b32",
    ),
]


@pytest.mark.parametrize(("call", "order", "scope", "instruction"), CASES)
def test_order_and_scope(call: str, order: str, scope: str, instruction: str) -> None:
    words = [f"__ATOMIC_{order}", f"__HIP_MEMORY_SCOPE_{scope}"]
    filled = call.format(*words) if "{0}" in call else call.format(", ".join(words))
    assert instruction in atomic(filled + ";")


@pytest.mark.parametrize(
    ("order", "scope", "instruction"),
    [
        ("RELEASE", "agent", "fence.release.gpu;"),
        ("ACQUIRE", "", "fence.acquire.sys;"),
        ("SEQ_CST", "workgroup", "fence.sc.cta;"),
    ],
)
def test_fences(order: str, scope: str, instruction: str) -> None:
    instructions = atomic(f'__builtin_amdgcn_fence(__ATOMIC_{order}, "{scope}");')
    assert fences(instruction).intersection(instructions), instructions


GRID_BARRIER = """
extern "C" __global__ void grid_barrier(unsigned* arrived, unsigned* data, unsigned rounds) {
  unsigned t = threadIdx.x, b = __builtin_amdgcn_workgroup_id_x();
  for (unsigned r = 0; r < rounds; ++r) {
    data[b * blockDim.x + t] += data[((b + 1) % gridDim.x) * blockDim.x + t] + r;
    __syncthreads();
    if (t == 0) {
      __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
      __hip_atomic_fetch_add(arrived, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
      while (__hip_atomic_load(arrived, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) <
             (r + 1) * gridDim.x)
        __builtin_amdgcn_s_sleep(1);
      __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    }
    __syncthreads();
  }
}
"""

PERSISTENT = """
extern "C" __global__ void persistent(unsigned* mailbox, unsigned* out) {
  __shared__ unsigned command;
  for (unsigned epoch = 1;; ++epoch) {
    if (threadIdx.x == 0) {
      while (__hip_atomic_load(mailbox, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM) < epoch)
        __builtin_amdgcn_s_sleep(8);
      command = mailbox[1];
    }
    __syncthreads();
    if (command == 0) return;
    unsigned sum = command * threadIdx.x;
    for (int step = 16; step > 0; step >>= 1) sum += __shfl_xor(sum, step);
    if (__lane_id() == 0) out[threadIdx.x / ARK_WAVE] = sum + __builtin_amdgcn_readfirstlane(sum);
    __syncthreads();
    if (threadIdx.x == 0)
      __hip_atomic_store(mailbox + 2, epoch, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
    __syncthreads();
  }
}
"""


def test_synchronisation_kernels_compile() -> None:
    barrier = compile_ptx(GRID_BARRIER)
    before, behind = re.split(r"\batom\.|\bred\.", barrier, maxsplit=1)
    assert any(f in before for f in fences("fence.release.gpu"))
    assert any(f in behind for f in fences("fence.acquire.gpu"))
    assert "bar.sync" in barrier and "nanosleep" in barrier
    persistent = compile_ptx(PERSISTENT, options=["-DUNUSED=1"])
    assert "ld.acquire.sys.b32" in persistent and "st.release.sys.b32" in persistent


@pytest.mark.parametrize("name", ("sync", "scan", "histogram", "sdma"))
def test_kernel_suite_compiles(name: str) -> None:
    """The kernel suite's files with synchronisation between blocks compile unmodified."""
    source = (Path(__file__).parent / "kernels" / f"{name}.hip").read_text()
    kernels = re.findall(r"^KERNEL (\w+)\(", source, re.MULTILINE)
    ptx = compile_ptx(source)
    assert kernels and all(f".entry {kernel}(" in ptx for kernel in kernels)


def test_refused_source_says_where() -> None:
    with pytest.raises(CompileError, match=r"kernel\.hip\(2\).*no_such_name"):
        compile_ptx("\n__device__ int x = no_such_name;\n")


def test_matrix_source_can_be_guarded() -> None:
    source = """
    extern "C" __global__ void k(int* out) {
    #if defined(__AMDGCN__)
      out[0] = __builtin_amdgcn_no_such_thing();
    #else
      out[0] = ARK_HIP_ON_NVRTC;
    #endif
    }"""
    assert ".entry k" in compile_ptx(source)
