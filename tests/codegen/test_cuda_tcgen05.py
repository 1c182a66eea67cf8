"""Matrix products on tensor memory (sm_100a), in the variant `matrix`: the compiler's output for
every type, transpose and edge, and the instruction descriptors. They are compiled but not run,
because no such GPU is available.
"""

from __future__ import annotations

import re
import struct

import pytest

from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.ir.dtype import bf16, fp16
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from tests import kept
from tests.cases.cuda_matrix import CASES, FEW_BITS, few_bits, product
from tests.codegen.machine_code import section
from tests.slow import slow

pytest.importorskip("cuda.bindings.nvrtc")

from ark_cuda import backend, machines

B200 = machines.MODELS["b200"]
# The lowest twelve bits of a 16-byte machine instruction, with nvdisasm 13.5's name for it. For a
# product, two bits of the upper half distinguish the kinds.
COMMIT, MULTIPLY = 0x3E9, 0x5EA  # UTCBAR; UTCHMMA, UTCIMMA or UTCQMMA
UNITS = {"f16": 0, "tf32": 0, "i8": 1, "f8f6f4": 3}


def compiled(plan: Plan, more: str = "") -> tuple[str, bytes, str]:
    """Source, machine code of the loop and the compiler's log of a plan's kernel."""
    machine = machine_of(plan)
    source = write(plan, machine, backend.dialect("sm_100a")).source
    source = type(source)(**{**vars(source), "text": source.text + more})
    binary = kept.binary(backend, source, Target("sm_100a", machine.threads))
    return source.text, section(binary.data, ".text.ark_loop"), binary.log


def check(plan: Plan, kind: str) -> None:
    """Asserts that the machine code has only product instructions of that kind, as many as one
    stage needs; that one commit instruction releases each stage and another one signals that a
    tile's sums are complete; and that no registers are spilled.
    """
    assert plan.variant == "matrix"
    source, code, log = compiled(plan)
    assert "wgmma.mma_async" not in source
    words = list(struct.iter_unpack("<QQ", code))
    assert {high >> 8 & 3 for low, high in words if low & 0xFFF == MULTIPLY} == {UNITS[kind]}
    signs = {MULTIPLY: "m", COMMIT: "c"}
    order = "".join(signs.get(low & 0xFFF, "") for low, _ in words)
    assert re.fullmatch(r"((mmmm)+c+)+", order), order
    assert order.count("c") > len(re.findall("m+", order)), order
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled
    assert not any(spilled)


# `nox` compiles every third case.
@pytest.mark.parametrize(
    ("left", "right", "m", "n", "k", "transposes", "dtype"),
    [pytest.param(*case, marks=[slow] * (i % 3 > 0)) for i, case in enumerate(CASES)],
)
def test_products_are_started_a_stage_at_a_time(left, right, m, n, k, transposes, dtype) -> None:
    check(product(B200, left, right, m, n, k, transposes, dtype, "matrix"), "f16")


@pytest.mark.parametrize(
    ("m", "n", "k", "types", "scaled", "instruction"),
    [pytest.param(*case, marks=[slow] * (i % 3 > 0)) for i, case in enumerate(FEW_BITS)],
)
def test_types_of_few_bits_have_instructions_of_their_own(
    m, n, k, types, scaled, instruction
) -> None:
    kind = "i8" if "s8" in instruction else "tf32" if "tf32" in instruction else "f8f6f4"
    check(few_bits(B200, m, n, k, types, scaled), kind)


def test_sums_of_the_largest_tile_fit_into_registers() -> None:
    plan = product(B200, (), (), 4096, 4096, 4096, (False, True), bf16)
    assert plan.ops[0].params["tile"] == [128, 256]
    check(plan, "f16")


def test_instruction_descriptors_follow_the_ptx_manual() -> None:
    """The expected bits were written by hand from the PTX manual, "Instruction descriptor": type of
    sums from bit 4 on, of a from 7, of b from 10; transposed a 15, b 16; columns / 8 from 17, rows
    / 16 from 24.
    """
    deal = "ArkDeal<1, 1, 1, 1, 1, 1, 128, 64>"
    known = [
        ("ark_bf16, ark_bf16, 128, 256, 128, false, false", 0x08400490),
        ("ark_f16, ark_f16, 64, 64, 64, true, true", 0x04118010),
        ("ark_bf16, ark_bf16, 128, 128, 128, false, true", 0x08210490),
        ("ark_e4m3, ark_e5m2, 64, 32, 8, false, false", 0x04080410),
        ("float, float, 128, 64, 128, false, false", 0x08100910),
        ("signed char, signed char, 64, 128, 64, false, false", 0x042004A0),
    ]
    lines = [
        f"static_assert(ArkTensorProduct<ArkProduct<{deal}, {types}, false, 1>>::HOW == {how}u);\n"
        for types, how in known
    ]
    planned = product(B200, (), (), 512, 512, 1024, (False, True), fp16)
    compiled(planned, "".join(lines))
