"""The module paths of ARK, from which scripts written for ARK import; ark's own code does not use
them.

`ark.profiler` is a file of its own, because `python -m ark.profiler` needs one. A module is loaded
when one of its names is used. Called once, by the package `ark`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

ALIASES = {
    "core": "ark.api.core",
    "data_type": "ark.ir.dtype",
    "error": "ark.errors",
    "executor": "ark.api.launched",
    "init": "ark.api.init",
    "model": "ark.frontend.model",
    "module": "ark.api.module",
    "planner": "ark.api.planner",
    "serialize": "ark.api.state",
    "tensor": "ark.frontend.tensor",
    "torch": "ark.interop.torch_names",
}


class _Alias(ModuleType):
    """A module with the names of another one."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__", "__wrapped__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(ALIASES[self._name()]), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(ALIASES[self._name()]), name, value)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(ALIASES[self._name()]))

    def _name(self) -> str:
        return self.__name__.rpartition(".")[2]


def install() -> None:
    """Registers the aliases, so that `import ark.planner` and the like work."""
    for name in ALIASES:
        sys.modules[f"ark.{name}"] = _Alias(f"ark.{name}")
