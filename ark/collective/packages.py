"""Imports optional packages, with a clear error if one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from ark.errors import SystemError


def require(module: str, extra: str = "comm") -> ModuleType:
    """Imports and returns a module. If it is missing, raises SystemError with the name of the extra
    of ark's package that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SystemError(
            f"this feature needs the package {package}, which cannot be imported here "
            f"({error}); install it with: pip install 'ark-gpu[{extra}]'."
        ) from error
