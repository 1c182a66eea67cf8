"""Saving and loading state dictionaries, as ARK does: a pickle of names and arrays.

Loading accepts arrays and plain Python values only, so a file from elsewhere cannot run code.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ark import log
from ark.errors import InvalidUsageError

_ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy.core.numeric", "_frombuffer"),
    ("numpy._core.numeric", "_frombuffer"),
    ("collections", "OrderedDict"),
    ("_codecs", "encode"),
    ("ml_dtypes", "bfloat16"),
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no array")
        return super().find_class(module, name)


def save(state_dict: Mapping[str, Any], path: str | Path) -> None:
    """Writes a state dictionary (names to NumPy arrays); warns if it is something else."""
    if not isinstance(state_dict, Mapping):
        log.warn("save was given no state dictionary; it is written as it is")
    with open(path, "wb") as out:
        pickle.dump(state_dict, out)


def load(path: str | Path) -> Any:
    """Reads what `save` wrote; InvalidUsageError if the file is missing, damaged or has code."""
    try:
        with open(path, "rb") as source:
            return _Reader(source).load()
    except OSError as error:
        raise InvalidUsageError(f"{path} cannot be read: {error}") from error
    except (pickle.UnpicklingError, EOFError, ValueError, AttributeError, ImportError) as error:
        raise InvalidUsageError(
            f"{path} is no saved state: {error}; write it with ark.save"
        ) from error
