"""Checks the resources of a kernel: scratch, LDS, registers, waves, and matrix instructions."""

from __future__ import annotations

from collections.abc import Iterator

from .findings import Expectations, Finding
from .listing import Function, Resources
from .loops import natural_loops
from .targets import TargetLimits

_MATRIX = ("v_mfma_", "v_smfmac_", "v_wmma_")


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule


def registers_a_wave(used: Resources, target: TargetLimits) -> int:
    """The vector registers that a wave takes from its SIMD's file, including accumulators and
    rounding.
    """
    if target.unified_accumulators:
        # In the kernel's metadata, vgpr_count already includes the accumulation registers (agprs),
        # which start at a multiple of four.
        total = used.vgprs
    else:
        total = max(used.vgprs, used.agprs)
    return _round_up(max(total, 1), target.vgpr_granule)


def waves_a_simd(used: Resources, target: TargetLimits) -> int:
    """The number of waves of this kernel per SIMD that its registers allow."""
    fits = target.vgprs_per_simd // registers_a_wave(used, target)
    return min(fits, target.waves_per_simd)


def _scratch(function: Function, used: Resources | None, target: TargetLimits) -> Iterator[Finding]:
    looped = {i for loop in natural_loops(function.blocks) for i in loop}
    for index, block in enumerate(function.blocks):
        for inst in block.instructions:
            # If private memory is a buffer, the resource descriptor of a kernel that uses it is in
            # s[0:3].
            private = target.private_buffer and (used is None or used.scratch > 0)
            private = private and inst.mnemonic.startswith("buffer_") and "s[0:3]" in inst.operands
            if not private and not inst.mnemonic.startswith("scratch_"):
                continue
            place = "inside a loop" if index in looped else "outside loops"
            yield Finding(
                "scratch",
                function.name,
                inst.line,
                inst.text,
                f"scratch memory is used {place}; a loop kernel keeps its values in registers. "
                "Use smaller tiles or fewer live values.",
            )
            return
    # Spills of scalar registers are not reported. They go to lanes of vector registers and need no
    # memory.
    if used and (used.scratch or used.vgpr_spills):
        yield Finding(
            "scratch",
            function.name,
            0,
            "",
            f"the kernel asks for {used.scratch} bytes of scratch a lane, with {used.vgpr_spills} "
            f"vector and {used.sgpr_spills} scalar registers spilled; expected none.",
        )


def _budgets(
    name: str, used: Resources, target: TargetLimits, expected: Expectations
) -> Iterator[Finding]:
    lds = used.lds + expected.dynamic_lds
    if lds > target.lds_per_workgroup:
        yield Finding(
            "lds",
            name,
            0,
            "",
            f"{lds} bytes of LDS; {target.arch} gives a workgroup {target.lds_per_workgroup}.",
        )
    elif _round_up(lds, target.lds_granule) * expected.workgroups_per_cu > target.lds_per_cu:
        yield Finding(
            "lds",
            name,
            0,
            "",
            f"{expected.workgroups_per_cu} workgroups of {lds} bytes of LDS do not fit a compute "
            f"unit of {target.arch} ({target.lds_per_cu} bytes); they would not all be resident.",
        )
    if registers_a_wave(used, target) > _round_up(target.vgprs_per_wave, target.vgpr_granule):
        yield Finding(
            "registers",
            name,
            0,
            "",
            f"{used.vgprs} vector registers; a wave of {target.arch} has {target.vgprs_per_wave}.",
        )
        return
    waves = -(-expected.threads // target.wave_size) * expected.workgroups_per_cu
    needed = -(-waves // target.simds_per_cu)
    held = waves_a_simd(used, target)
    if needed > held:
        limit = target.vgprs_per_simd // needed // target.vgpr_granule * target.vgpr_granule
        yield Finding(
            "registers",
            name,
            0,
            "",
            f"{expected.workgroups_per_cu} workgroups of {expected.threads} threads need {needed} "
            f"waves on each SIMD of {target.arch}, and {used.vgprs} vector registers leave room "
            f"for {held}; use at most {limit} registers or fewer threads.",
        )


def check_resources(
    function: Function, used: Resources | None, target: TargetLimits, expected: Expectations
) -> list[Finding]:
    """All findings of the resource rules for one function. ``used`` is None if it is not a
    kernel.
    """
    findings = [] if expected.allow_scratch else list(_scratch(function, used, target))
    if used is None:
        return findings
    findings.extend(_budgets(function.name, used, target, expected))
    matrix = any(i.mnemonic.startswith(_MATRIX) for i in function.instructions())
    if expected.matrix and not matrix:
        findings.append(
            Finding(
                "matrix",
                function.name,
                0,
                "",
                "the plan counts on matrix instructions (MFMA or WMMA) and there is none.",
            )
        )
    return findings
