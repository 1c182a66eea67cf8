"""Tile sizes of a vendor's matrix-unit bodies. The planner chooses among these only. Each vendor's
machines.py defines them. Called by ark.lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Count


@dataclass(frozen=True)
class BoxTiles:
    """Tile sizes of products on warpgroups, whose operands are loaded by box copies.

    tiles: rows and columns; if several cuts are predicted to take the same time, the first is
        taken.
    narrow: those of `tiles` that are used for few rows only, and only if the right operand is
        contiguous along k.
    plain: those that are used only if the right operand is contiguous along k and sums are stored
        one by one.
    shallow: those that are not used for windows, because they leave too few stages.
    parts: the numbers of parts of k to try.
    normed_parts: the most parts of k if a norm adds them up.
    attention_rows: queries of an attention tile.
    """

    tiles: tuple[tuple[Count, Count], ...]
    narrow: tuple[tuple[Count, Count], ...]
    plain: tuple[tuple[Count, Count], ...]
    shallow: tuple[tuple[Count, Count], ...]
    parts: tuple[Count, ...]
    normed_parts: Count
    attention_rows: Count

    @property
    def least_rows(self) -> int:
        """The smallest number of rows of any of these tiles."""
        return min(rows for rows, _ in self.tiles)


@dataclass(frozen=True)
class UnitTiles:
    """Tile sizes of products on matrix units in any variant, besides the sizes with a loop of their
    own.

    block: rows and columns that a matrix unit multiplies at once.
    least_columns: the fewest columns of a tile.
    parts: the numbers of parts of k to try.
    """

    block: Count
    least_columns: Count
    parts: tuple[Count, ...]
