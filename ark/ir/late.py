"""Tables that are filled when they are first needed, so that imports are lazy. Examples are the
tables of task kinds, ops and methods of tensors. Modules of lower layers read such a table, and
modules of higher layers fill it. If a name that is looked up is missing, the table calls its
function in `fillers`, which imports the modules that fill it. ark/__init__.py, which is above all
layers, sets these functions. So `import ark` loads none of the higher layers, and no layer imports
one above itself.
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
