"""Writes the bodies of device functions that compute several elementwise results of one shape in
one pass over their operands, such as a parameter and its moments in an optimizer's update. The
values that results share are computed once. Called by the task kind `fusion`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ark.plan.kind import Signature
from ark.tasks import expression, text
from ark.tasks.box_text import Vectors
from ark.tasks.box_writer import BoxWriter

MIN_PACKED_ELEMENTS = 2048  # elements of a tile that are computed by vectors


class RegionWriter(BoxWriter):
    """Writes the loop body of a pointwise region. trees: the expressions, in the order in which
    they are computed; an expression reads the operands and, by the numbers after theirs, the values
    of earlier expressions. stores: for each result the number of its value.
    """

    def __init__(
        self,
        sig: Signature,
        trees: Sequence[expression.Tree],
        stores: Sequence[int],
        tile: Sequence[int],
    ) -> None:
        self.trees, self.stores = trees, stores
        super().__init__(sig, (), tile, {})

    def _first_output(self) -> int:
        return len(self.sig.operands) - len(self.stores)

    def vectors(self) -> Vectors:
        """The vectors of the operands. In small tiles they are single elements; otherwise not all
        threads would have work.
        """
        return super().vectors() if math.prod(self.tile) >= MIN_PACKED_ELEMENTS else Vectors()

    def choices(self) -> list[Vectors]:
        """The ways in which vectors can be accessed: only one, for aligned operands. Code for other
        addresses would take registers in which a thread holds the vectors that it loads ahead.
        """
        vectors = self.vectors()
        return [vectors] if vectors.size > 1 else []

    def _results(self, values: Sequence[str], places: Sequence[tuple[str, str]]) -> str:
        """Statements that compute all results of one element and store result i at places[i], a
        pair of a pointer and an index.
        """
        leaves = [(value, text.loaded(self.sig, i)) for i, value in enumerate(values)]
        writer = expression.Writer(leaves, text.literal)
        for tree in self.trees:
            leaves.append(writer.write(tree))
        stored = [
            text.store(self.sig, self.out + i, *place, leaves[number][0])
            for i, (number, place) in enumerate(zip(self.stores, places, strict=True))
        ]
        return "".join(f"    {line}\n" for line in (*writer.statements, *stored))

    def _outputs(self) -> range:
        return range(self.out, len(self.sig.operands))

    def _element(self) -> str:
        values = [self._value(i) for i in range(self.out)]
        return self._results(values, [(f"p{i}", self._at(i)) for i in self._outputs()])

    def _store(self, values: Sequence[str], vector: int) -> str:
        operands = self.sig.operands
        vectors = "".join(
            f"      ArkPack<{operands[i].ctype}, {vector}> s{i};\n" for i in self._outputs()
        )
        stores = "".join(
            f"        ark_store_pack<{vector}>(p{i} + {self._at(i)}, s{i});\n"
            for i in self._outputs()
        )
        results = self._results(values, [(f"s{i}.v", "j") for i in self._outputs()])
        return (
            f"{vectors}#pragma unroll\n"
            f"      for (int j = 0; j < {vector}; ++j) {{\n{results}      }}\n"
            f"      if (inside) {{\n{stores}      }}\n"
        )
