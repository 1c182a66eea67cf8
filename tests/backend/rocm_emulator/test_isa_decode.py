"""Decoder and disassembler against LLVM's assembler, for every opcode that the emulator executes.

Random words are decoded and printed; the assembler must turn the text back into an instruction that
decodes to the same text, and into the same words but for fields that the instruction does not use.
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

# Opcodes that must be proven this way, by architecture (of those the decoder knows).
PROVEN = {"gfx90a": 1280, "gfx942": 1310, "gfx950": 1340, "gfx1100": 1480}
# Names the assembler has no such text for, or whose every operand the sampler cannot hit.
UNPROVABLE = re.compile(
    r"v_(swap|fma(mk|ak)_f16|fma(mk|ak)_f32|mad(mk|ak)_f(16|32))|s_waitcnt_\w+|ds_nop|s_setpc"
    r"|v_(readfirstlane|accvgpr_mov|dot2acc|permlane64).*_e64|flat_atomic_csub_u32"
)


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
        # LLVM packs a half of this one's inline constants into a literal.
        if executed and "v_pk_fmac" not in text:
            chosen.append((form, opcode, struct.pack(f"<{length}I", *padded[:length])))
            lines.append(text)
    known: dict[tuple[str, int], str] = {}
    proven: set[tuple[str, int]] = set()
    wrong: defaultdict[str, list[str]] = defaultdict(list)
    assembled = assemble_each(lines, arch, tmp_path)
    for index, (form, opcode, data) in enumerate(chosen):
        known[form, opcode] = lines[index].split()[0]
        made = assembled.get(index)
        if made is None:
            continue
        words = [*struct.unpack(f"<{len(made) // 4}I", made), 0, 0, 0][:4]
        again = core().disassemble_words(arch, words)[0][1]
        if made == data or again == lines[index]:
            proven.add((form, opcode))
        else:
            wrong[form].append(f"{lines[index]}: {data.hex()} but assembled {made.hex()} ({again})")
    assert not wrong, dict(wrong)
    assert len(proven) >= PROVEN[arch]
    if arch in ("gfx950", "gfx1100"):
        unproven = {name for key, name in known.items() if key not in proven}
        assert sorted(n for n in unproven if not UNPROVABLE.search(n)) == []
