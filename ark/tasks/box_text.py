"""Calls of the loops of box.h, as source: over a tile's indices, by all threads or in order."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = ("i0", "i1", "i2", "i3")  # of the indices


def tile_type(tile: Sequence[int], shape: Sequence[int]) -> str:
    """The type that says the sizes of a tile and of the folded shape that it is of (box.h)."""
    return f"ArkTile<{', '.join(map(str, (*tile, *shape)))}>"


def each_index(tile: Sequence[int], shape: Sequence[int], body: str) -> str:
    """Statements that all threads run for each index i0 to i3 of the task's tile of a shape."""
    return loop("ark_each_index", tile_type(tile, shape), "", NAMES, body)


def in_order(tile: Sequence[int], shape: Sequence[int], body: str) -> str:
    """Statements that one thread runs for i0 to i3 of the task's tile, in order but for the last
    dimension, whose indices may be done side by side.
    """
    return loop("ark_each_in_order", tile_type(tile, shape), "", NAMES, body)


def declared(names: Sequence[str]) -> str:
    return ", ".join(f"int {name}" for name in names)


def unused_names(names: Sequence[str]) -> str:
    return " ".join(f"(void){name};" for name in names)


def loop(callee: str, constants: str, parameters: str, names: Sequence[str], body: str) -> str:
    """The call of a loop of box.h with a body that takes parameters, or indices by name."""
    head = f"    {unused_names(names)}\n" if names else ""
    listed = parameters or declared(names)
    return f"  {callee}<{constants}>(t.coord, [&]({listed}) {{\n{head}{body}  }});\n"
