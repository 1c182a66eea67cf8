"""Tiles of matrix units that a vendor's bodies are written for: the planner chooses among these and
makes no others. Each vendor's machines.py has them. Called by ark.lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Count


@dataclass(frozen=True)
class BoxTiles:
    """Of products that box copies load for warpgroups.

    tiles: rows and columns; of cuts that are predicted to take the same time the first is taken.
    narrow: those of them for few rows alone, where k of the right side lies side by side. plain:
    those where it does and sums are stored one by one. shallow: those that leave too few stages
    for windows. parts: of k, the numbers to try. normed_parts:
    of k where a norm adds them up, at most. attention_rows: queries of a tile of attention.
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
        """Rows of the lowest tile."""
        return min(rows for rows, _ in self.tiles)


@dataclass(frozen=True)
class UnitTiles:
    """Of products that matrix units take in any variant, beside those with a loop of their own.

    block: rows and columns that a unit multiplies at once. least_columns: of a tile. parts: of k,
    the numbers to try.
    """

    block: Count
    least_columns: Count
    parts: tuple[Count, ...]
