"""Loads the optional packages that collectives need, with one clear error where one is missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from ark.errors import SystemError


def require(module: str) -> ModuleType:
    """Returns the imported module; raises SystemError naming the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise SystemError(
            f"ark.comm needs the package {package}, which cannot be imported here ({error}); "
            "install it with: pip install 'ark-gpu[comm]'."
        ) from error
