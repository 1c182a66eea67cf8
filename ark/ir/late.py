"""Tables that higher layers fill for lower ones: task kinds, ops, methods of tensors.

A table is filled when a name is looked up that it does not have. The function that fills it is in
`fillers`; ark/__init__.py, above all layers, puts it there. So importing ark loads none of these
layers, and no layer imports one above itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

fillers: dict[str, Callable[[], object]] = {}
"""For each table a function that imports the modules which fill it."""


class LateTable(dict[str, Value], Generic[Value]):
    """A dict by name that is filled at the first look-up of a missing name."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self._table = table

    def filled(self) -> LateTable[Value]:
        """The complete table, after its filler's modules are imported (by this thread or by another
        one).
        """
        fillers[self._table]()
        return self

    def __missing__(self, name: str) -> Value:
        if name in self.filled():
            return self[name]
        raise KeyError(name)
