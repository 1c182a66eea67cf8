"""The emulator's fast paths: instructions whose lanes are all active, and sequences of instructions
that run without a call of the scheduler in between. Each must give the same result as the general
path.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from isa_program import Case, Suite, Words
from numpy.typing import NDArray

from tests.kept import compile_hip

ARCHS = ["gfx942", "gfx1100"]
PI = np.float32(np.pi)  # s8
# {0} and {1}: the destination, one or two registers. v10 to v15 hold inputs, s8 and s9 numbers.
ONE_OR_TWO_REGISTERS = [
    *(f"v_{name}_f32 {{0}}, {sources}"
      for name in ("add", "sub", "mul", "max") for sources in ("v10, v11", "s8, v11", "0.5, v11")),
    "v_mul_f32_e64 {0}, v10, s8", "v_fmac_f32 {0}, v10, v11", "v_fmac_f32 {0}, s8, v11",
    "v_fma_f32 {0}, v10, v11, v12", "v_fma_f32 {0}, s8, v11, v12", "v_fma_f32 {0}, v10, s8, v12",
    "v_fma_f32 {0}, v10, v11, 1.0", "v_fma_f32 {0}, v10, 2.0, 1.0", "v_fma_f32 {0}, -v10, v11, v12",
    "v_mov_b32 {0}, v10", "v_mov_b32 {0}, s8", "v_mov_b32 {0}, 0x12345", "v_not_b32 {0}, v10",
    "v_cvt_f32_u32 {0}, v10", "v_cvt_f32_i32 {0}, v10",
    "v_and_b32 {0}, v10, v11", "v_or_b32 {0}, s8, v11", "v_xor_b32 {0}, 17, v11",
    "v_lshlrev_b32 {0}, 3, v11", "v_lshrrev_b32 {0}, v10, v11", "v_ashrrev_i32 {0}, s8, v11",
    "v_bfe_u32 {0}, v10, 3, 7", "v_bfi_b32 {0}, v10, v11, v12", "v_alignbit_b32 {0}, v10, v11, 5",
    "v_perm_b32 {0}, v10, v11, s8", "v_lshl_add_u32 {0}, v10, 2, v12",
    "v_and_or_b32 {0}, v10, s8, v12",
    "v_add3_u32 {0}, v10, v11, s8", "v_med3_i32 {0}, v10, v11, v12", "v_mul_lo_u32 {0}, v10, s8",
    "v_cndmask_b32 {0}, v10, v11, vcc", "v_cndmask_b32_e64 {0}, 0, 1, vcc",
    "v_cndmask_b32_e64 {0}, v10, 1.0, vcc",
]  # fmt: skip
CDNA = [
    "v_add_u32 {0}, v10, v11", "v_sub_u32 {0}, s8, v11", "v_subrev_u32 {0}, 5, v11",
    "v_add_co_u32 {0}, s[20:21], v10, v11", "v_addc_co_u32 {0}, s[20:21], v10, v11, vcc",
    "v_sub_co_u32 {0}, s[20:21], v10, s8", "v_subbrev_co_u32 {0}, s[20:21], v10, v11, vcc",
    "v_mad_u64_u32 {1}, s[20:21], v10, v11, v[12:13]",
    "v_mad_u64_u32 {1}, s[20:21], v10, s8, v[12:13]",
    "v_mad_u64_u32 {1}, s[20:21], s8, v11, v[12:13]", "v_mad_u64_u32 {1}, s[20:21], v10, v11, 0",
    "v_lshl_add_u64 {1}, v[10:11], 3, v[12:13]", "v_lshl_add_u64 {1}, v[10:11], v14, v[12:13]",
    "v_lshl_add_u64 {1}, v[10:11], 0, s[8:9]", "v_lshl_add_u64 {1}, s[8:9], 7, v[12:13]",
    "v_mov_b64 {1}, v[10:11]", "v_mov_b64 {1}, s[8:9]",
    "v_pk_fma_f32 {1}, v[10:11], v[12:13], v[14:15]",
    "v_pk_fma_f32 {1}, v[10:11], v[12:13], v[14:15] op_sel_hi:[0,1,0]",
    "v_pk_fma_f32 {1}, v[10:11], s[8:9], v[14:15]",
    "v_pk_fma_f32 {1}, v[10:11], s[8:9], v[14:15] op_sel_hi:[1,0,1]",
    "v_pk_fma_f32 {1}, v[10:11], v[12:13], v[14:15] op_sel:[1,0,0] neg_hi:[0,1,0]",
    "v_pk_mul_f32 {1}, s[8:9], v[12:13]", "v_pk_mul_f32 {1}, v[10:11], v[12:13] op_sel_hi:[1,0]",
    "v_pk_add_f32 {1}, v[10:11], v[12:13]",
]  # fmt: skip
RDNA = [
    "v_add_nc_u32 {0}, v10, v11", "v_sub_nc_u32 {0}, s8, v11", "v_subrev_nc_u32 {0}, 5, v11",
    "v_add_co_u32 {0}, s20, v10, v11", "v_add_co_ci_u32_e64 {0}, s20, v10, v11, vcc_lo",
    "v_mad_u64_u32 {1}, s20, v10, v11, v[12:13]", "v_mad_u64_u32 {1}, s20, v10, s8, v[12:13]",
    "v_cndmask_b32_e64 {0}, s8, v11, vcc",
    "v_dual_mul_f32 {0}, v10, v11 :: v_dual_mov_b32 v55, v12",
    "v_dual_add_f32 {0}, s8, v11 :: v_dual_fmac_f32 v55, v14, v13",
]  # fmt: skip
COMPARED: dict[str, Callable[[Words, Words], NDArray[np.bool_]]] = {
    "lt_f32 {}, v10, v11": lambda a, b: a.view(np.float32) < b.view(np.float32),
    "gt_f32 {}, s8, v11": lambda a, b: b.view(np.float32) < PI,
    "le_f32 {}, v10, s8": lambda a, b: a.view(np.float32) <= PI,
    "ne_u32 {}, v10, v11": lambda a, b: a != b,
    "ge_i32 {}, v10, 3": lambda a, b: a.view(np.int32) >= 3,
    "lt_u32 {}, 64, v11": lambda a, b: b > 64,
}


def _case(text: str, rdna: bool) -> Case:
    """Returns the case of an instruction that runs with all lanes active (v40), then with every
    third lane, and then with the remaining lanes.
    """
    mask, exec_, high = ("b32", "exec_lo", "") if rdna else ("b64", "exec", "s_mov_b32 s13, {}\n")
    some, others = ("0x49249249", "0x92492492"), ("0xb6db6db6", "0x6db6db6d")
    low = "\ns_mov_b32 s12, {}\n"
    if rdna:
        text = (
            text.replace(", vcc\n", ", vcc_lo\n").replace("vcc", "vcc_lo").replace("_lo_lo", "_lo")
        )
    start = "s_mov_b32 s8, 0x40490fdb\ns_mov_b32 s9, 0xbf9d70a4\n"
    start += f"v_cmp_lt_u32 vcc{'_lo' * rdna}, v14, v15"
    keep = "s12" if rdna else "s[12:13]"

    def at(register: int) -> str:
        return text.format(f"v{register}", f"v[{register}:{register + 1}]")

    parts = [start, at(40)]
    for words in (some, others):
        parts += [low.format(words[0]) + high.format(words[1]),
                  f"s_mov_{mask} {exec_}, {keep}", at(42)]  # fmt: skip
    parts.append(f"s_mov_{mask} {exec_}, -1")
    return Case("\n".join(parts), inputs=6, outputs=4)


def _comparison(text: str, rdna: bool) -> Case:
    """Returns the case of a comparison that runs with all lanes active, and then with only the
    lower half active.
    """
    low, all_, half = ("s20", "s20", "0xffff") if rdna else ("s20", "s[20:21]", "0xffffffff")
    exec_ = "s_mov_b32 exec_lo" if rdna else "s_mov_b64 exec"
    lines = ["s_mov_b32 s8, 0x40490fdb", f"v_cmp_{text.format(all_)}", f"v_mov_b32 v40, {low}",
             "v_mov_b32 v41, s21", f"{exec_}, -1", "s_mov_b32 exec_lo, " + half]  # fmt: skip
    lines += [] if rdna else ["s_mov_b32 exec_hi, 0"]
    lines += [f"v_cmp_{text.format(all_)}", f"{exec_}, -1", f"v_mov_b32 v42, {low}",
              "v_mov_b32 v43, s21"]  # fmt: skip
    return Case("\n".join(["s_mov_b32 s21, 0", *lines]), inputs=6, outputs=4)


@lru_cache(maxsize=2)
def _suite(arch: str) -> tuple[Suite, dict[str, str]]:
    rdna = arch == "gfx1100"
    texts = {
        f"i{k}": text for k, text in enumerate(ONE_OR_TWO_REGISTERS + (RDNA if rdna else CDNA))
    }
    cases = {name: _case(text, rdna) for name, text in texts.items()}
    cases |= {f"c{k}": _comparison(text, rdna) for k, text in enumerate(COMPARED)}
    return Suite(arch, cases), texts


def _inputs(lanes: int) -> Words:
    """Returns six rows of inputs. In each row every second lane has a float, the others have random
    bits.
    """
    generator = np.random.default_rng(7)
    inputs = generator.integers(0, 2**32, (6, lanes), dtype=np.uint64).astype(np.uint32)
    floats = generator.standard_normal((6, lanes)).astype(np.float32).view(np.uint32)
    inputs[:, ::2] = floats[:, ::2]
    return inputs


@pytest.mark.parametrize("arch", ARCHS)
def test_all_lanes_at_once_and_in_parts(arch: str) -> None:
    suite, texts = _suite(arch)
    for name, text in texts.items():
        got = suite.run(name, list(_inputs(suite.lanes)))
        assert np.array_equal(got[:2], got[2:]), text
        assert got[:2].any(), f"{text} left nothing"


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("number", range(len(COMPARED)), ids=list(COMPARED))
def test_comparisons(arch: str, number: int) -> None:
    suite, _ = _suite(arch)
    inputs = _inputs(suite.lanes)
    inputs[0, 5] = inputs[1, 5]
    got = suite.run(f"c{number}", list(inputs))
    expected = list(COMPARED.values())[number](inputs[0], inputs[1])
    bits = [
        int(low) | int(high) << 32 for low, high in ((got[0][0], got[1][0]), (got[2][0], got[3][0]))
    ]
    whole = sum(int(bit) << lane for lane, bit in enumerate(expected))
    assert bits == [whole, whole & ((1 << suite.lanes // 2) - 1)]


# Ways to write EXEC. {b}: 64 or 32 bits; {all}: EXEC; {some}, {keep}: scalar registers.
WAYS = [
    "s_mov_b{b} {all}, {some}", "s_mov_b32 exec_lo, s12", "s_and_b{b} {all}, {all}, {some}",
    "s_and_saveexec_b{b} {keep}, {some}", "s_andn1_wrexec_b{b} {keep}, s[14:15]",
    "s_bfm_b{b} {all}, 5, 0", "s_cmov_b{b} {all}, {some}", "s_bitset0_b32 exec_lo, 3",
    "v_cmpx_gt_u32 {all}, s8, v10", "v_readlane_b32 exec_lo, v10, 7",
    "v_cmp_gt_u32 {all}, s8, v10",
]  # fmt: skip


def _way(text: str, rdna: bool) -> Case:
    """Returns the case of an instruction that writes EXEC, followed by one that shows which lanes
    are then active (v40). EXEC itself is a result, too.
    """
    if rdna:
        text = text.replace("s[14:15]", "s14").replace("_andn1_", "_and_not0_")
        text = text.replace("v_cmpx_gt_u32 {all}, ", "v_cmpx_gt_u32 ")
        names = {"b": "32", "all": "exec_lo", "some": "s12", "keep": "s22"}
    else:
        names = {"b": "64", "all": "exec", "some": "s[12:13]", "keep": "s[22:23]"}
    lines = ["s_mov_b32 s12, 0x49249249", "s_mov_b32 s13, 0x12492492", "s_mov_b32 s14, 0x55",
             "s_mov_b32 s15, 0x5500", "s_movk_i32 s8, 9", "s_cmp_eq_u32 s8, s8",
             text.format(**names), "v_mov_b32 v40, 1",
             f"s_mov_b{names['b']} s[24:25], exec" if not rdna else "s_mov_b32 s24, exec_lo",
             "s_mov_b64 exec, -1" if not rdna else "s_mov_b32 exec_lo, -1",
             "v_mov_b32 v41, s24", "v_mov_b32 v42, s25"]  # fmt: skip
    return Case("\n".join(["s_mov_b32 s25, 0", *lines]), inputs=1, outputs=3)


@pytest.mark.parametrize("arch", ARCHS)
def test_whatever_writes_exec_counts_for_the_next_instruction(arch: str) -> None:
    suite = Suite(arch, {f"w{k}": _way(text, arch == "gfx1100") for k, text in enumerate(WAYS)})
    inputs = np.arange(suite.lanes, dtype=np.uint32)
    for k, text in enumerate(WAYS):
        reached, low, high = suite.run(f"w{k}", [inputs])
        exec_ = int(low[0]) | int(high[0]) << 32
        assert 0 < exec_ < (1 << suite.lanes) - 1, text
        assert sum(int(bit) << lane for lane, bit in enumerate(reached)) == exec_, text


SOURCE = """
extern "C" __global__ void work(unsigned* out, unsigned n, unsigned long long far) {
  unsigned x = threadIdx.x;
  for (unsigned k = 0; k < n; ++k) {
    x = x * 1664525u + 1013904223u;
    x ^= x >> 7;
    if (k == 20) out[far + (x & 1)] = x;
    x += x << 3;
  }
  out[threadIdx.x] = x;
}
"""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("far", [64, 1 << 40])
def test_slice_lengths_do_not_change_counts(arch: str, far: int) -> None:
    """The instruction count of a run, also up to a fault, does not depend on how many instructions
    the scheduler runs at a time: one, a few, or more than a row.
    """
    ends = set()
    for max_slice in (1, 3, 256):
        machine = core().Machine([arch])
        loaded = machine.load(core().CodeObject(compile_hip(SOURCE, arch, ("-O2",))), 0)
        out = machine.allocate(0, "device", 1024, "out")
        machine.write(out, bytes(1024))
        arguments = np.array([out, 40, far], np.uint64).tobytes()
        options = core().LaunchOptions(max_slice=max_slice)
        launch = core().LaunchDesc(loaded, "work", (1, 1, 1), (32, 1, 1), arguments, 0, options)
        result = machine.run(launch)
        assert ("out of bounds" in result.message) == (far != 64), result.message
        place = result.where.line if not result.ok else machine.read(out, 1024)
        ends.add((result.instructions, place))
    assert len(ends) == 1
