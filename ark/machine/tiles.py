"""Tile sizes of the device functions for matrix units. The planner chooses only among these. Each
vendor's machines.py defines them. Called by ark.lower.
"""

from __future__ import annotations

from dataclasses import dataclass

from ark.machine.ranges import Bytes, Count


@dataclass(frozen=True)
class BoxTiles:
    """Tile sizes of products on warpgroups. Box copies load the operands. k is the inner dimension.

    tiles: rows and columns of each size. The planner takes the first of several sizes with the same
        predicted time.
    narrow: the sizes of `tiles` that are used only for products of few rows whose right operand is
        contiguous along k.
    plain: the sizes of `tiles` that have two conditions. Each element of the result is stored by a
        store of its own (not by box copies), and the right operand is contiguous along k or a
        tile's columns fill whole 128-byte lines of it.
    shallow: the sizes of `tiles` that are not used for convolutions, because their stages are so
        large that too few fit into shared memory.
    parts: the numbers of parts into which k may be cut (split-K).
    deep_parts: further numbers of parts, for a k of at least `deep_bytes` bytes. Such a k is that
        of the gradient of a convolution's weights, whose result has few tiles.
    normed_parts: the largest number of parts of k if a norm adds up their partial sums.
    attention_rows: the number of queries of an attention tile.
    codes: the tile sizes of products of few rows with quantised weights, which are loaded in
        quantised form.
    """

    tiles: tuple[tuple[Count, Count], ...]
    narrow: tuple[tuple[Count, Count], ...]
    plain: tuple[tuple[Count, Count], ...]
    shallow: tuple[tuple[Count, Count], ...]
    parts: tuple[Count, ...]
    normed_parts: Count
    attention_rows: Count
    codes: tuple[tuple[Count, Count], ...] = ()
    deep_parts: tuple[Count, ...] = ()
    deep_bytes: Bytes = 0

    @property
    def least_rows(self) -> int:
        """The smallest number of rows of the sizes in `tiles`."""
        return min(rows for rows, _ in self.tiles)


@dataclass(frozen=True)
class UnitTiles:
    """Tile sizes of products on matrix units in functions that work in every kernel variant,
    besides Machine.large_tiles.

    block: the rows and columns of a tile are multiples of this, the size of a matrix instruction.
    least_columns: the fewest columns of a tile.
    parts: the numbers of parts into which the planner may cut the inner dimension k.
    """

    block: Count
    least_columns: Count
    parts: tuple[Count, ...]
