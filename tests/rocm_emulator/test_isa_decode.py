"""Decoder and disassembler against LLVM's assembler, for every opcode that the emulator executes.

Random words are decoded and printed; the assembler must turn the text back into an instruction that
decodes to the same text, and whose words are the same except for fields that the instruction does
not use.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from ark_rocm_emulator.compile import toolchain
from ark_rocm_emulator.engine import core
from isa_encodings import samples

# The number of opcodes that this test must cover, by architecture.
PROVEN = {"gfx90a": 1300, "gfx942": 1350, "gfx950": 1450, "gfx1100": 1515}
# Opcodes that the assembler cannot write in this form, or some of whose operands the sampler does
# not draw.
UNPROVABLE = re.compile(
    r"v_(swap|fma(mk|ak)_f16|fma(mk|ak)_f32|mad(mk|ak)_f(16|32))|s_waitcnt_\w+|ds_nop|s_setpc"
    r"|v_(readfirstlane|accvgpr_mov|dot2acc|permlane64).*_e64|flat_atomic_csub_u32"
)

# Instructions written by hand, with operands that the sampler does not draw.
WRITTEN = {
    "gfx942": (
        "s_load_dwordx4 s[4:7], s[0:1], s9 offset:0x15 glc",
        "v_cvt_f32_fp8_sdwa v65, v97 src0_sel:BYTE_2",
        "v_cvt_pk_f32_bf8_sdwa v[64:65], v97 src0_sel:WORD_1",
        "v_fma_mixhi_f16 v129, -v7, exec_lo, neg(1)",
        "v_lshrrev_b16_e32 v193, -17, v105",
        "v_mov_b64_dpp v[2:3], v[254:255] row_newbcast:15 row_mask:0xa bank_mask:0x5",
        "v_add_co_u32_e64 v65, s[98:99], v97, ttmp3",
        "ds_write2st64_b64 v7, a[2:3], a[6:7] offset0:255 offset1:1",
        "buffer_store_dwordx3 a[10:12], v[6:7], s[8:11], m0 idxen offen offset:4095 sc1",
        "global_atomic_pk_add_bf16 a255, v3, a7, vcc offset:-4096 sc0",
    ),
    "gfx90a": (
        "v_madak_f16 v41, v161, v185, -17",
        "s_load_dword s5, s[2:3], -0x15 glc",
    ),
    "gfx1100": (
        "v_cmp_le_f32_e64 exec_hi, v1, v97",
        "v_cndmask_b32_e64 v7, v9, v255, exec_hi",
        "v_cmp_lt_f16_e64 s1, -s101, |s103| op_sel:[1,1]",
        "v_mad_i32_i16 v33, 0, s1, vcc_hi op_sel:[0,1,0,0]",
        "v_med3_f16 v217.h, 37, |s5|, v129.h op_sel:[0,1,1,1]",
        "v_or_b16 v33.l, s1, -17",
        "v_add_f32_e64_dpp v7, -v9, |v255| clamp mul:4 dpp8:[7,6,5,4,3,2,1,0] fi:1",
        "v_dual_fmaak_f32 v7, s101, v9, 0x12345678 :: v_dual_fmamk_f32 v10, 0x12345678, 0x12345678,"
        " v11",
    ),
}
# Invalid instruction words: with an invalid register for a result, or with an extension (DPP or
# SDWA) of an opcode that has none.
IMPOSSIBLE = {
    "gfx942": ([0xD04400FB, 0x00024081], [0x7E0000FA, 0xFF013000], [0x7E0000F9, 0x06060606]),
    "gfx1100": ([0xD41200FD, 0x000201C0], [0x7E0000FA, 0xFF010101], [0x7E0000E9, 0x01234500]),
}


def assemble_each(lines: list[str], arch: str, folder: Path) -> dict[int, bytes]:
    """The bytes of every line that the assembler accepts, by its index."""
    live = list(range(len(lines)))
    source, target = folder / "lines.s", folder / "lines.o"
    command = [*toolchain().clang, "-x", "assembler", "-target", "amdgcn-amd-amdhsa"]
    command += [f"-mcpu={arch}", "-ferror-limit=0", "-c", str(source), "-o", str(target)]
    for _ in range(3):
        source.write_text("".join(f"at{i}: {lines[i]}\n" for i in live))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        refused = {int(n) - 1 for n in re.findall(r"lines\.s:(\d+):\d+: error", done.stderr)}
        if not refused:
            break
        live = [i for k, i in enumerate(live) if k not in refused]
    text, labels = _text_and_labels(target.read_bytes())
    ends = [labels[f"at{i}"] for i in live[1:]] + [len(text)]
    return {i: text[labels[f"at{i}"] : end] for i, end in zip(live, ends, strict=True)}


def _text_and_labels(elf: bytes) -> tuple[bytes, dict[str, int]]:
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, table + k * size) for k in range(count)]

    def name(base: int, offset: int) -> str:
        return elf[base + offset : elf.index(b"\0", base + offset)].decode()

    text, labels = b"", {}
    for section in sections:
        if name(sections[names][4], section[0]) == ".text":
            text = elf[section[4] : section[4] + section[5]]
        if section[1] == 2:  # the symbol table
            strings = sections[section[6]][4]
            for k in range(section[5] // 24):
                offset, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", elf, section[4] + 24 * k)
                labels[name(strings, offset)] = value
    return text, labels


@pytest.mark.parametrize("arch", PROVEN)
def test_every_opcode_round_trips(arch: str, tmp_path: Path) -> None:
    chosen, lines = [], []
    for form, opcode, words in samples(arch, 4):
        padded = [*words, 0, 0, 0][:4]
        length, text, executed = core().disassemble_words(arch, padded)[0]
        # Excluded: v_pk_fmac, whose inline constants LLVM replaces by a literal.
        if executed and "v_pk_fmac" not in text:
            chosen.append((form, opcode, struct.pack(f"<{length}I", *padded[:length])))
            lines.append(text)
    known: dict[tuple[str, int], str] = {}
    proven: set[tuple[str, int]] = set()
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    assembled = assemble_each(lines, arch, tmp_path)
    for index, (form, opcode, data) in enumerate(chosen):
        known[form, opcode] = lines[index].split()[0]
        encoded = assembled.get(index)
        if encoded is None:
            continue
        words = [*struct.unpack(f"<{len(encoded) // 4}I", encoded), 0, 0, 0][:4]
        redecoded = core().disassemble_words(arch, words)[0][1]
        if encoded == data or redecoded == lines[index]:
            proven.add((form, opcode))
        else:
            wrong[form].append(
                f"{lines[index]}: {data.hex()} but assembled {encoded.hex()} ({redecoded})"
            )
    assert not wrong, dict(wrong)
    assert len(proven) >= PROVEN[arch]
    if arch in ("gfx950", "gfx1100"):
        unproven = {name for key, name in known.items() if key not in proven}
        assert sorted(n for n in unproven if not UNPROVABLE.search(n)) == []


@pytest.mark.parametrize("arch", WRITTEN)
def test_assembled_instructions_disassemble_to_their_text(arch: str, tmp_path: Path) -> None:
    lines = list(WRITTEN[arch])
    encoded = assemble_each(lines, arch, tmp_path)
    assert [line for k, line in enumerate(lines) if k not in encoded] == []
    texts = []
    for index, line in enumerate(lines):
        words = [*struct.unpack(f"<{len(encoded[index]) // 4}I", encoded[index]), 0, 0][:4]
        length, text, _ = core().disassemble_words(arch, words)[0]
        assert 4 * length == len(encoded[index]), (line, text)
        texts.append(text)
    assert assemble_each(texts, arch, tmp_path) == encoded, texts


@pytest.mark.parametrize("arch", IMPOSSIBLE)
def test_invalid_encodings_are_not_decoded(arch: str) -> None:
    for words in IMPOSSIBLE[arch]:
        assert core().disassemble_words(arch, [*words, 0, 0])[0][0] == 0, [hex(w) for w in words]
