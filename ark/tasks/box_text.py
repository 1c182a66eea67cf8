"""Writes C++ calls of the loops in box.h, which run over all indices of a tile, either with all
threads of a block or with one thread in order. Used by task kinds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NAMES = ("i0", "i1", "i2", "i3")  # names of the loop indices


@dataclass(frozen=True)
class Vectors:
    """How a device function accesses its operands: by vectors (each of `size` neighbouring
    elements) or by single elements.

    size: 1 if no operand is accessed by vectors. whole: the numbers of operands whose vectors are
    aligned to the vector's size in bytes. loose: the numbers of inputs whose vectors may begin at
    any element; such a vector is loaded as the two aligned vectors that it overlaps. All other
    operands are accessed by single elements.
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
