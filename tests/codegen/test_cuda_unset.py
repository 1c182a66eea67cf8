"""Variables of CUDA device functions that are set only under a condition and read under the same
condition. The compiled code must not read their registers before it writes them: otherwise the
registers would be occupied during the whole loop over tasks. No register may be spilled.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from ark.backend.codegen.dialect import Source
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.cli.measure.case import OpCase
from ark.cli.measure.cases import cases
from ark.cli.measure.ops import planned
from ark.cli.measure.sweep.cases import case
from ark.ir.dtype import bf16
from ark.plan.serialize import machine_of
from ark.plan.types import Plan

pytest.importorskip("cuda.bindings.nvrtc")
pytest.importorskip("torch")

from ark_cuda import backend, machines
from ark_cuda.compiler import NvrtcCompiler
from cuda.bindings import nvrtc

from tests import kept, signatures
from tests.codegen.unset import unset
from tests.slow import SLOW

ARCH, MACHINE = "sm_90a", machines.MODELS["h200"]
# The plans of tests.signatures whose device functions have variables that some paths do not set.
PLANS = {"matmul-bf16", "indexing-bf16", "sums-bf16", "llama-bf16-batch", "llama-bf16-rank0"}


def _convnext(t: Any, x: Any, filters: Any, weight: Any, bias: Any) -> Any:
    mixed = t.nn.functional.conv2d(x, filters, padding=3, groups=96).permute(0, 2, 3, 1)
    return t.nn.functional.layer_norm(mixed, (96,), weight, bias)


# A part of the network ConvNeXt: a depthwise convolution, and the norm of its result.
CONVNEXT = case("convnext", _convnext, (8, 96, 56, 56), (96, 1, 7, 7), (96,), (96,), dtype=bf16)
NAMES = (
    "sweep-softmax-64x128256-bf16",
    "sweep-softmax-1-16x1000x128-bf16",
    "sweep-bilinear-16x64x56x56-fp32",
    "sweep-bilinear-odd-16x64x57x57-fp32",
    "sweep-batch-norm-training-16x64x56x56-bf16",
)
CASES = [CONVNEXT, *(one for one in cases() if one.name in NAMES)]

# A minimal example: a loop calls a function whose array v is loaded under a condition. INITIAL is
# replaced by an initialisation of v, or by nothing.
LOADED = """
__noinline__ __device__ void add(float* p, const float* q, int n) {
  float v[4]INITIAL;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x + i < n) v[i] = q[threadIdx.x + i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (threadIdx.x + i < n) p[threadIdx.x * 4 + i] = v[i];
  }
}
extern "C" __global__ void ark_loop(float* p, int n) {
  for (int i = 0; i < n; ++i) add(p + i, p, n);
}
"""


def ptx(source: Source) -> str:
    """The PTX of all parts of a kernel."""

    key = NvrtcCompiler().key(Target(ARCH, 0))

    def compiled(text: str) -> str:
        return kept.text(lambda: _compiled(text), "ptx", key, text)

    return "\n".join(map(compiled, _parts(source)))


def _parts(source: Source) -> list[str]:
    return [f"#define ARK_PART {n}\n{source.text}" for n in range(max(source.parts, 1))]


def _compiled(text: str) -> str:
    _, program = nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", 0, [], [])
    options = [b"-arch=compute_90a", b"-std=c++17", b"-default-device", b"-rdc=true"]
    assert nvrtc.nvrtcCompileProgram(program, len(options), options)[0] == 0
    code = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, code)
    return code.decode().rstrip("\0")


def sources(plan: Plan) -> list[tuple[Source, int]]:
    """The source of each kernel of a plan, and its threads."""
    result = []
    for phases in plan.kernels:
        machine = machine_of(plan, phases[0])
        emitted = write(plan, machine, backend.dialect(ARCH), phases)
        result.append((emitted.source, machine.threads))
    return result


def test_pack_that_is_loaded_under_a_condition_is_reported() -> None:
    texts = [LOADED.replace("INITIAL", initial) for initial in ("", " = {}")]
    partial, none = (unset(ptx(Source(text, "ark_loop"))) for text in texts)
    assert partial and all(len(writers) == 4 for writers in partial.values())
    assert all("ld." in writer for writers in partial.values() for writer in writers)
    assert none == {}


def test_no_body_reads_a_register_before_it_is_written() -> None:
    types = signatures.types_for(ARCH, backend.archs())
    unset_registers = {}
    for name, plan in signatures.plans(MACHINE, types):
        if SLOW or name in PLANS:
            for source, _ in sources(plan):
                unset_registers |= {
                    f"{name} {f}": writers for f, writers in unset(ptx(source)).items()
                }
    assert unset_registers == {}


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_no_register_is_spilled(one: OpCase) -> None:
    plan, _ = planned(one, MACHINE)
    for source, threads in sources(plan):
        binary = kept.binary(backend, source, Target(ARCH, threads))
        spills = re.findall(r"(\d+) bytes spill stores", binary.log)
        assert spills and max(map(int, spills)) == 0
        assert unset(ptx(source)) == {}
