"""Writes C++ calls of the loops in box.h, which run over all indices of a tile, either with all
threads of a block or with one thread in order. Used by task kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMES = ("i0", "i1", "i2", "i3")  # names of the loop indices


@dataclass(frozen=True)
class Packs:
    """How operands are accessed. size: the number of elements of a pack; 1 if packs are impossible.
    whole: operands whose packs are aligned. loose: inputs whose packs begin at any element. Other
    operands are read element by element.
    """

    size: int = 1
    whole: frozenset[int] = frozenset()
    loose: frozenset[int] = frozenset()


def tile_type(tile: Sequence[int], shape: Sequence[int]) -> str:
    """The text of the C++ type (box.h) that holds the sizes of a tile and of the four-dimensional
    shape that contains it.
    """
    return f"ArkTile<{', '.join(map(str, (*tile, *shape)))}>"


def each_index(tile: Sequence[int], shape: Sequence[int], body: str) -> str:
    """Statements in which all threads together run the body for each index i0 to i3 of the task's
    tile.
    """
    return loop("ark_each_index", tile_type(tile, shape), "", NAMES, body)


def in_order(tile: Sequence[int], shape: Sequence[int], body: str) -> str:
    """Statements in which one thread runs the body for each index i0 to i3 of the task's tile, in
    order, except that indices of the last dimension may be vectorised.
    """
    return loop("ark_each_in_order", tile_type(tile, shape), "", NAMES, body)


def declared(names: Sequence[str]) -> str:
    return ", ".join(f"int {name}" for name in names)


def unused_names(names: Sequence[str]) -> str:
    return " ".join(f"(void){name};" for name in names)


def loop(callee: str, constants: str, parameters: str, names: Sequence[str], body: str) -> str:
    """The text of a call of a loop in box.h with `body` as its loop body. The body is a lambda with
    the given parameters or, if `parameters` is empty, with index parameters called `names`.
    """
    head = f"    {unused_names(names)}\n" if names else ""
    listed = parameters or declared(names)
    return f"  {callee}<{constants}>(t.coord, [&]({listed}) {{\n{head}{body}  }});\n"
