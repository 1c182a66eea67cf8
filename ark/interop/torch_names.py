"""The names in the module `ark.torch`: torch's names, if torch is installed, and ark's own.

ark's own names are `Module`, a torch module that computes in one of ark's kernels, and `Options`
and `block` for ark.inference_model and ark.training_model.

torch is imported when one of its names is first used.
"""

from __future__ import annotations

import importlib.util
from typing import Any

_no_torch = importlib.util.find_spec("torch") is None


def __getattr__(name: str) -> Any:
    if name.startswith("__") or _no_torch:
        raise AttributeError(f"module 'ark.torch' has no attribute {name!r}")
    if name in ("Module", "Options", "block"):
        import ark.interop.torch as ours

        return getattr(ours, name)
    import torch

    return torch if name == "torch" else getattr(torch, name)
