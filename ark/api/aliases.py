"""ARK's module paths: scripts written for ARK import from them; ark's own code never does.

`ark.profiler` is a file of its own, because `python -m ark.profiler` needs one. Called once, by
the package `ark`.
"""

from __future__ import annotations

import sys
from types import ModuleType

from ark import errors
from ark.api import core, init, launched, module, planner, state, torch_names
from ark.frontend import model, tensor
from ark.ir import dtype

ALIASES: dict[str, ModuleType] = {
    "core": core,
    "data_type": dtype,
    "error": errors,
    "executor": launched,
    "init": init,
    "model": model,
    "module": module,
    "planner": planner,
    "serialize": state,
    "tensor": tensor,
    "torch": torch_names,
}


def install(package: ModuleType) -> None:
    """Makes `import ark.planner` and the like work; names that the package has stay as they are."""
    for name, target in ALIASES.items():
        sys.modules[f"{package.__name__}.{name}"] = target
        if name not in vars(package):
            setattr(package, name, target)
