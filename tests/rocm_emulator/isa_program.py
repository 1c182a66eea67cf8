"""Runs single instructions on the emulator. The per-instruction tests use it.

A case is a few lines of assembly. Loads of its inputs to v10, v11, ... come before it, and stores
of v40, v41, ... after it. Every lane has different values. All cases of a test module are in one
code object, so that the assembler starts once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from ark_rocm_emulator.engine import core
from numpy.typing import NDArray

from tests.kept import assemble

FIRST_INPUT = 10
OFFSET_REACH_BYTES = 4096  # bytes that the offset of a global access spans
VGPR_COUNT = 192
SCRATCH_BYTES = 64  # bytes of private memory a lane, where it needs no registers (not on gfx90a)
SCRATCH_DIRECTIVES = (
    "\t\t.amdhsa_enable_private_segment 1",
    f"\t\t.amdhsa_private_segment_fixed_size {SCRATCH_BYTES}",
)
Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Case:
    """A case: lines of assembly and the numbers of their inputs and outputs. ``body`` may use v10
    on (inputs), v40 on (outputs), and v60 on and s8 on as temporaries.

    ``first_output`` is the first output register; it is moved from v40 if there are many inputs.
    """

    body: str
    inputs: int
    outputs: int = 1
    first_output: int = 40


def _rows(text: str, base: int, registers: range, stride: int) -> list[str]:
    """Returns a load or store instruction for each register, at addresses ``stride`` bytes apart.
    The base address moves when offsets reach their limit.
    """
    lines = []
    for k, register in enumerate(registers):
        if k > 0 and k * stride % OFFSET_REACH_BYTES == 0:
            lines += [f"\ts_add_u32 s{base}, s{base}, {OFFSET_REACH_BYTES:#x}"]
            lines += [f"\ts_addc_u32 s{base + 1}, s{base + 1}, 0"]
        lines.append("\t" + text.format(register, k * stride % OFFSET_REACH_BYTES))
    return lines


def _kernel(name: str, case: Case, arch: str) -> str:
    rdna = arch.startswith("gfx11")
    stride = 128 if rdna else 256
    load, store = ("b32", "b32") if rdna else ("dword", "dword")
    lines = [
        f"\t.globl {name}",
        "\t.p2align 8",
        f"\t.type {name},@function",
        f"{name}:",
        f"\ts_load_{'b128' if rdna else 'dwordx4'} s[4:7], s[0:1], 0x0",
        "\tv_lshlrev_b32_e32 v0, 2, v0",
        "\ts_waitcnt lgkmcnt(0)",
    ]
    registers = range(FIRST_INPUT, FIRST_INPUT + case.inputs)
    lines += _rows(f"global_load_{load} v{{}}, v0, s[4:5] offset:{{}}", 4, registers, stride)
    lines.append("\ts_waitcnt vmcnt(0)")
    registers = range(case.first_output, case.first_output + case.outputs)
    # The output registers are set to 0 first, so that a result does not depend on a register that
    # the kernel has not written.
    lines += [f"\tv_mov_b32_e32 v{k}, 0" for k in registers]
    lines += ["\t" + line.strip() for line in case.body.strip().splitlines()]
    lines += _rows(f"global_store_{store} v0, v{{}}, s[6:7] offset:{{}}", 6, registers, stride)
    lines += ["\ts_endpgm", f".L{name}_end:", f"\t.size {name}, .L{name}_end-{name}"]
    lines += [
        '\t.section .rodata,"a",@progbits',
        "\t.p2align 6",
        f"\t.amdhsa_kernel {name}",
        "\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1",
        "\t\t.amdhsa_kernarg_size 16",
        f"\t\t.amdhsa_next_free_vgpr {VGPR_COUNT}",
        "\t\t.amdhsa_next_free_sgpr 64",
        "\t\t.amdhsa_group_segment_fixed_size 4096",
        "\t\t.amdhsa_float_denorm_mode_32 3",  # as clang compiles HIP
        *(() if arch == "gfx90a" else SCRATCH_DIRECTIVES),
        "\t\t.amdhsa_wavefront_size32 1" if rdna else "\t\t.amdhsa_accum_offset 144",
        "\t.end_amdhsa_kernel",
        "\t.text",
    ]
    return "\n".join(lines) + "\n"


def _metadata(names: Sequence[str], arch: str, wave: int) -> str:
    argument = (
        "      - .address_space: global\n        .offset: {}\n        .size: 8\n"
        "        .value_kind: global_buffer\n"
    )
    text = "\t.amdgpu_metadata\n---\namdhsa.kernels:\n"
    for name in names:
        text += "  - .args:\n" + argument.format(0) + argument.format(8)
        text += f"    .name: {name}\n    .symbol: {name}.kd\n"
        text += "    .group_segment_fixed_size: 4096\n    .kernarg_segment_align: 8\n"
        text += "    .kernarg_segment_size: 16\n    .max_flat_workgroup_size: 64\n"
        scratch = 0 if arch == "gfx90a" else SCRATCH_BYTES
        text += f"    .private_segment_fixed_size: {scratch}\n    .sgpr_count: 64\n"
        text += f"    .vgpr_count: {VGPR_COUNT}\n    .wavefront_size: {wave}\n"
    text += f"amdhsa.target: amdgcn-amd-amdhsa--{arch}\namdhsa.version:\n  - 1\n  - 2\n...\n"
    return text + "\t.end_amdgpu_metadata\n"


def build(arch: str, cases: Mapping[str, Case]) -> bytes:
    """Assembles a code object that has one kernel for each case, with the case's name."""
    text = (
        f'\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"\n\t.amdhsa_code_object_version 5\n\t.text\n'
    )
    text += "".join(_kernel(name, case, arch) for name, case in cases.items())
    return assemble(
        text + _metadata(list(cases), arch, 32 if arch.startswith("gfx11") else 64), arch
    )


class Suite:
    """The cases of one architecture. All cases are assembled when the first of them runs. One wave
    runs a case.
    """

    def __init__(self, arch: str, cases: Mapping[str, Case]) -> None:
        self.arch, self.cases = arch, dict(cases)
        self.lanes = 32 if arch.startswith("gfx11") else 64

    @cached_property
    def _machine(self) -> tuple[Any, Any]:
        machine = core().Machine([self.arch])
        code = core().CodeObject(build(self.arch, self.cases))
        return machine, machine.load(code, 0)

    def run(self, name: str, inputs: Sequence[Words], seed: int = 0, checks: bool = False) -> Words:
        """Runs a case. Returns the output registers' words (register, lane). Raises
        ``AssertionError`` with the emulator's message.
        """
        case = self.cases[name]
        assert len(inputs) >= case.inputs, f"{name} takes {case.inputs} inputs"
        machine, code = self._machine
        rows = np.zeros((max(case.inputs, 1), self.lanes), np.uint32)
        for k in range(case.inputs):
            rows[k] = inputs[k]
        size = case.outputs * self.lanes * 4
        source = machine.allocate(0, "device", rows.nbytes, "inputs")
        target = machine.allocate(0, "device", size, "outputs")
        try:
            machine.write(source, rows.tobytes())
            options = core().LaunchOptions(seed=seed, checks=checks, step_budget=1_000_000)
            arguments = np.array([source, target], np.uint64).tobytes()
            launch = core().LaunchDesc(
                code, name, (1, 1, 1), (self.lanes, 1, 1), arguments, 0, options
            )
            result = machine.run(launch)
            assert result.ok, f"{name}: {result.message}"
            raw = machine.read(target, size)
        finally:
            machine.release(source)
            machine.release(target)
        return np.frombuffer(raw, np.uint32).reshape(case.outputs, self.lanes)
