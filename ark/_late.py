"""Tables that higher layers fill with what lower ones call: task kinds, ops, a tensor's methods.

A table is filled when a name of it is asked for that it does not have, by the function that the
package `ark`, which lies above all layers, puts into `fillers`. So importing ark loads none of
these layers, and no layer names one above itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

fillers: dict[str, Callable[[], object]] = {}
"""By table: imports the modules that fill it."""


class LateTable(dict[str, Value], Generic[Value]):
    """A dict by name; `filled` is the same with all that it will ever have."""

    def __init__(self, table: str) -> None:
        super().__init__()
        self._table = table

    def filled(self) -> LateTable[Value]:
        """The table, with its filler's modules imported (by this thread or by one it waits for)."""
        fillers[self._table]()
        return self

    def __missing__(self, name: str) -> Value:
        if name in self.filled():
            return self[name]
        raise KeyError(name)
