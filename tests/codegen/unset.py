"""Registers that PTX may read before it has written them.

Such a register is live from the beginning of its function, and before: in the loop over tasks and
in all other functions that the loop calls. A compiler that inlines or allocates registers across
functions therefore has fewer of them everywhere. Most are variables that are loaded and used under
the same condition.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

REGISTER = re.compile(r"%[a-z]{1,2}\d+\b")
FUNCTION = re.compile(r"^(?:\.\w+ )?\.(?:entry|func)\b([^{;]*?)^\{", re.M)
# Instructions whose first operand is not a result, or is read too (wgmma.mma_async).
NO_RESULT = re.compile(
    r"(st|red|bra|brx|ret|exit|trap|bar|barrier(?!\.red)|cp|fence|membar|prefetch\w*|nanosleep"
    r"|setmaxnreg|stmatrix|discard|griddepcontrol|mbarrier\.(init|inval|expect\w*)|wgmma)\b"
)


@dataclass
class Block:
    """A sequence of instructions that is executed from its beginning to its end.

    needs: registers that it reads before it writes them. sets: registers that it writes in any
    case. after: the labels of its successors; "" for the block that follows in the text.
    """

    needs: set[str]
    sets: set[str]
    after: list[str]


def unset(ptx: str) -> dict[str, list[str]]:
    """By function, the instructions that write registers which may be read before; only functions
    that have any.
    """
    writers: dict[str, list[str]] = {}
    for name, body in _functions(ptx):
        code = list(_statements(body))
        registers = _live_at_begin(code)
        if registers:
            writers[name] = [s for _, s in code if registers & set(_result(s))]
    return writers


def _functions(ptx: str) -> Iterator[tuple[str, str]]:
    for head in FUNCTION.finditer(ptx):
        depth, end = 1, head.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(ptx[end], 0)
            end += 1
        yield re.findall(r"([\w$]+)\s*\(", head[1])[-1], ptx[head.end() : end - 1]


def _statements(body: str) -> Iterator[tuple[str, str]]:
    """Pairs of a label and "", or of "" and an instruction with its predicate."""
    for piece in re.split(r"(;|^\$[\w$]+:)", re.sub(r"//.*", "", body), flags=re.M):
        text = " ".join(piece.lstrip("{} \t\n").split())
        if text.startswith("$") and text.endswith(":"):
            yield text[:-1], ""
        elif text not in ("", ";"):
            yield "", text


def _plain(statement: str) -> str:
    """The instruction without its predicate."""
    return re.sub(r"^@\S+ ", "", statement)


def _result(statement: str) -> list[str]:
    """The registers of the first operand, if it is a result."""
    if NO_RESULT.match(_plain(statement)):
        return []
    first = re.match(r"\{[^}]*\}|[^,]*", _plain(statement).partition(" ")[2])
    return REGISTER.findall(first[0]) if first else []


def _blocks(code: Sequence[tuple[str, str]]) -> tuple[list[Block], dict[str, int]]:
    """The blocks, and the number of each label's block."""
    blocks, labels, tables = [Block(set(), set(), [])], {}, {}
    label, ended = "", False
    for name, statement in code:
        if name or ended:
            if not ended:
                blocks[-1].after.append("")
            blocks.append(Block(set(), set(), []))
            ended = False
        if name:
            label = name
            labels[name] = len(blocks) - 1
            continue
        if statement.startswith(".branchtargets"):
            tables[label] = re.findall(r"\$[\w$]+", statement)
            continue
        if statement.startswith("."):
            continue
        block = blocks[-1]
        result, given = _result(statement), REGISTER.findall(statement)
        for register in result:
            given.remove(register)
        block.needs |= set(given) - block.sets
        block.sets |= set() if statement.startswith("@") else set(result)
        if re.match(r"(bra|brx|ret|exit|trap)\b", _plain(statement)):
            block.after = re.findall(r"\$[\w$]+", statement) + [""] * statement.startswith("@")
            ended = True
    for block in blocks:
        block.after = [t for a in block.after for t in tables.get(a, [a])]
    return blocks, labels


def _live_at_begin(code: Sequence[tuple[str, str]]) -> set[str]:
    blocks, labels = _blocks(code)
    live = [set(block.needs) for block in blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            next_ones = (labels[a] if a else i + 1 for a in blocks[i].after)
            later = set().union(*(live[n] for n in next_ones if n < len(live)))
            now = live[i] | later - blocks[i].sets
            changed, live[i] = changed or now != live[i], now
    return live[0]
