"""Inlines the functions that a kernel calls, so that the lint's rules can follow a path through
them. The instructions before a call load the address of the called function. If these instructions
are in another block than the call, every function whose address the caller loads may be the called
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .listing import Block, Function, Instruction

_SYMBOL = re.compile(r"^([\w.$]+)@rel32@lo")
_PAIR = re.compile(r"^s\[(\d+):\d+\]$")


def with_calls(function: Function, functions: Iterable[Function]) -> Function:
    """Returns `function` with each call replaced by a copy of the called function, also within the
    copies. Recursive calls and calls of functions that are not in `functions` are skipped.
    """
    return _expanded(function, {f.name: f for f in functions}, (function.name,))


def _expanded(
    function: Function, known: Mapping[str, Function], within: tuple[str, ...]
) -> Function:
    named = dict.fromkeys(n for i in function.instructions() if (n := _symbol(i)) in known)
    if not named:
        return function
    blocks = [Block(list(b.instructions), list(b.follows)) for b in function.blocks]
    for block in blocks[: len(function.blocks)]:
        call = block.instructions[-1] if block.instructions else None
        if call is None or call.mnemonic != "s_swappc_b64":
            continue
        callee = _target(block, call)
        targets = [n for n in ([callee] if callee in known else named) if n not in within]
        back, block.follows = block.follows, [] if targets else block.follows
        for name in targets:
            block.follows.append(len(blocks))
            _append(blocks, _expanded(known[name], known, (*within, name)), back)
    return Function(function.name, tuple(blocks))


def _append(blocks: list[Block], callee: Function, back: list[int]) -> None:
    """Appends a copy of the callee's blocks to `blocks`. Blocks of the callee that return are
    followed by the blocks `back`.
    """
    first = len(blocks)
    for block in callee.blocks:
        returns = bool(block.instructions) and block.instructions[-1].mnemonic == "s_setpc_b64"
        follows = back if returns else [first + index for index in block.follows]
        blocks.append(Block(list(block.instructions), list(follows)))


def _symbol(inst: Instruction) -> str:
    """The function whose address an instruction adds to the program counter."""
    match = _SYMBOL.match(inst.operands[-1]) if inst.operands else None
    return match[1] if match else ""


def _target(block: Block, call: Instruction) -> str:
    pair = _PAIR.match(call.operands[-1])
    for inst in reversed(block.instructions):
        if pair and inst.operands[:1] == (f"s{pair[1]}",):
            return _symbol(inst)
    return ""
