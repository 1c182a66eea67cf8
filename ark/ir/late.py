"""Tables that modules of lower layers read and modules of higher layers fill, such as the tables of
task kinds, ops and methods of tensors. They make imports lazy: a table is filled when a name is
looked up that it does not have yet. The function that fills it is in `fillers`, where
ark/__init__.py, which is above all layers, puts it. So `import ark` loads none of the higher
layers, and no layer imports one above itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

Value = TypeVar("Value")

fillers: dict[str, Callable[[], object]] = {}
"""For each table, a function that imports the modules which add the table's entries."""


class LateTable(dict[str, Value], Generic[Value]):
    """A dict whose keys are names. If a name is missing when it is looked up, the modules that fill
    the dict are imported first.
    """

    def __init__(self, table: str) -> None:
        super().__init__()
        self._table = table

    def filled(self) -> LateTable[Value]:
        """Returns the table after all modules that fill it are imported, by this thread or by
        another one.
        """
        fillers[self._table]()
        return self

    def __missing__(self, name: str) -> Value:
        if name in self.filled():
            return self[name]
        raise KeyError(name)
