"""Reads AMD GPU assembly text into functions, basic blocks and resource figures.

Two forms are read: the output of ``clang -S`` (labels, directives, the metadata note), and a plain
listing of labels and one instruction per line, to which ``as_assembly`` converts a disassembly. The
rules of the lint work on the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_CACHE_BITS = frozenset({"glc", "slc", "dlc", "sc0", "sc1", "nt"})
_LABEL = re.compile(r"^([A-Za-z_.$][\w.$@]*):")
MARKERS = ("read", "acquire", "release", "released", "arrived")
_MARKER = re.compile(rf"^\s*;\s*ark\.({'|'.join(MARKERS)}) (workgroup|agent|system)\s*$")
_COUNTER = re.compile(r"\b(vmcnt|lgkmcnt|expcnt)\((\d+)\)")
_LISTED = re.compile(r"^([0-9a-f]+): ((?:[0-9a-f]{8} )+) ?(\S.*)$")
_BRANCH = re.compile(r"^(s_c?branch\w*) (-?\d+)$")
_ENDS = ("s_branch", "s_cbranch", "s_endpgm", "s_setpc", "s_swappc")
_KERNEL_KEY = re.compile(r"^ {4}\.(\w+):\s*(.+?)\s*$")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction, or a marker: an assembly comment such as `; ark.release agent`,
    which states the intended synchronisation.

    ``mnemonic`` has no encoding suffix; a marker has one of ``MARKERS`` as its mnemonic and
    the scope in ``operands``. ``line`` counts from 1 in the text that was given.
    """

    mnemonic: str
    operands: tuple[str, ...]
    bits: frozenset[str]
    text: str
    line: int

    @property
    def is_marker(self) -> bool:
        return self.mnemonic in MARKERS


@dataclass
class Block:
    """Instructions that run in order, and the indices of the blocks that may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function body as basic blocks. Block 0 is the entry."""

    name: str
    blocks: tuple[Block, ...]

    def instructions(self) -> list[Instruction]:
        return [inst for block in self.blocks for inst in block.instructions]


@dataclass(frozen=True)
class Resources:
    """The resources that one kernel requests: LDS and scratch in bytes, registers per lane."""

    lds: int = 0
    scratch: int = 0
    vgprs: int = 0
    agprs: int = 0
    sgprs: int = 0
    vgpr_spills: int = 0
    sgpr_spills: int = 0


@dataclass(frozen=True)
class Listing:
    """All functions of a text; ``resources`` has an entry for each function that is a kernel."""

    functions: tuple[Function, ...]
    resources: Mapping[str, Resources]


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


def waited(inst: Instruction) -> Mapping[str, int]:
    """The counters for which a wait instruction (a form of ``s_waitcnt``) waits, each with the
    number of accesses that may stay in flight.
    """
    if inst.mnemonic == "s_waitcnt":
        counters = {name: int(value) for name, value in _COUNTER.findall(inst.text)}
        if not counters and inst.operands and _number(inst.operands[0]) == 0:
            return {"vmcnt": 0, "lgkmcnt": 0, "expcnt": 0}
        return counters
    if inst.mnemonic == "s_waitcnt_vscnt" and inst.operands[:1] in (("null",), ("off",)):
        left = _number(inst.operands[-1])
        return {} if left is None else {"vscnt": left}
    return {}


def _parse_instruction(text: str, line: int) -> Instruction | None:
    body = re.split(r";|//", text, maxsplit=1)[0].strip()
    if not body or body.startswith((".", "#")):
        return None
    mnemonic, _, rest = body.partition(" ")
    rest = rest.strip()
    words = [word for word in re.split(r"[,\s]+", rest) if word]
    bits = frozenset(word for word in words if word in _CACHE_BITS)
    operands = tuple(word for word in words if word not in _CACHE_BITS)
    mnemonic = re.sub(r"_(e32|e64|dpp|sdwa|e64_dpp)$", "", mnemonic)
    return Instruction(mnemonic, operands, bits, body, line)


def _link(blocks: list[Block], labels: Mapping[str, int]) -> tuple[Block, ...]:
    for index, block in enumerate(blocks):
        last = next((i for i in reversed(block.instructions) if not i.is_marker), None)
        name = last.mnemonic if last else ""
        if name in ("s_endpgm", "s_setpc_b64", "s_trap"):
            continue
        if (name == "s_branch" or name.startswith("s_cbranch")) and last and last.operands:
            target = labels.get(last.operands[0])
            if target is not None:
                block.follows.append(target)
        if name != "s_branch" and index + 1 < len(blocks) and index + 1 not in block.follows:
            block.follows.append(index + 1)
    return tuple(blocks)


def _parse_function(name: str, lines: list[tuple[int, str]]) -> Function:
    blocks = [Block()]
    labels: dict[str, int] = {}
    for number, text in lines:
        label = _LABEL.match(text)
        if label:
            if blocks[-1].instructions:
                blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
            continue
        marker = _MARKER.match(text)
        if marker:
            instruction = Instruction(marker[1], (marker[2],), frozenset(), text.strip(), number)
            blocks[-1].instructions.append(instruction)
            continue
        inst = _parse_instruction(text, number)
        if inst is None:
            continue
        blocks[-1].instructions.append(inst)
        if inst.mnemonic.startswith(_ENDS):
            blocks.append(Block())
    if len(blocks) > 1 and not blocks[-1].instructions and len(blocks) - 1 not in labels.values():
        blocks.pop()
    return Function(name, _link(blocks, labels))


def _parse_resources(lines: list[str]) -> dict[str, Resources]:
    """Reads the kernels' resources from the metadata note. The note has one group of keys per
    kernel, indented by four spaces.
    """
    resources: dict[str, Resources] = {}
    group: dict[str, str] = {}

    def figure(key: str) -> int:
        return _number(group.get(key, "0")) or 0

    def close() -> None:
        if "name" in group:
            resources[group["name"]] = Resources(
                lds=figure("group_segment_fixed_size"),
                scratch=figure("private_segment_fixed_size"),
                vgprs=figure("vgpr_count"),
                agprs=figure("agpr_count"),
                sgprs=figure("sgpr_count"),
                vgpr_spills=figure("vgpr_spill_count"),
                sgpr_spills=figure("sgpr_spill_count"),
            )
        group.clear()

    inside = False
    for text in lines:
        if text.strip() == ".amdgpu_metadata":
            inside = True
        elif text.strip() == ".end_amdgpu_metadata":
            break
        elif inside:
            if text.startswith("  - "):
                close()
                text = "    " + text[4:]
            key = _KERNEL_KEY.match(text)
            if key:
                group[key[1]] = key[2]
    close()
    return resources


def parse(assembly: str) -> Listing:
    """Parses assembly text or a disassembly listing.

    A function starts at a label that is not local (local labels start with ``.L`` or with
    ``L`` and a number) and ends at the next such label or at ``.Lfunc_end``.
    """
    functions: list[Function] = []
    name = ""
    body: list[tuple[int, str]] = []
    lines = assembly.splitlines()
    for number, text in enumerate(lines, 1):
        if text.strip() == ".amdgpu_metadata":
            break
        label = _LABEL.match(text)
        ends = label is not None and label[1].startswith(".Lfunc_end")
        starts = label is not None and not re.match(r"\.?L\w", label[1])
        if ends or starts:
            if name and body:
                functions.append(_parse_function(name, body))
            name, body = (label[1] if starts and label else ""), []
        elif name:
            body.append((number, text))
    if name and body:
        functions.append(_parse_function(name, body))
    code = tuple(f for f in functions if f.instructions())
    return Listing(code, _parse_resources(lines))


def as_assembly(function: str, listing: str) -> str:
    """The emulator's disassembly of one function as text for ``lint``: branches get labels.

    Args:
        function: its name.
        listing: lines "offset: words  text"; a branch holds its 16-bit displacement in dwords.
    """
    lines: list[tuple[int, str]] = []
    targets: set[int] = set()
    for line in listing.splitlines():
        match = _LISTED.match(line)
        if not match:
            continue
        offset, text = int(match[1], 16), match[3]
        branch = _BRANCH.match(text)
        if branch:
            displacement = (int(branch[2]) + 0x8000) % 0x10000 - 0x8000
            target = offset + 4 + 4 * displacement
            targets.add(target)
            text = f"{branch[1]} .L{target:x}"
        lines.append((offset, text))
    body = [f"{function}:"]
    for offset, text in lines:
        if offset in targets:
            body.append(f".L{offset:x}:")
        body.append("\t" + text)
    return "\n".join(body) + "\n"
