"""The emulator core as a Python module, built on first use.

It provides devices, memory and launches to tests of single instructions, the benchmark and tools.
Code that needs HIP uses ``ark_rocm_emulator.device`` instead.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from ark.errors import SystemError

from .build import PACKAGE, core_sources, shared_library

_NAME = "_ark_emu"


@lru_cache(maxsize=1)
def core() -> ModuleType:
    """The compiled module: ``Machine``, ``CodeObject``, ``LaunchDesc``, ``disassemble_words``...

    Raises:
        SystemError: pybind11 or a compiler is missing, or compiling failed.
    """
    try:
        import pybind11
    except ImportError:
        raise SystemError(
            "pybind11 was not found; the emulator core needs it to become a Python module. "
            "Install it: pip install ark-gpu-rocm-emulator."
        ) from None
    file_name = _NAME + str(sysconfig.get_config_var("EXT_SUFFIX"))
    sources = [*core_sources(), PACKAGE / "core" / "module.cpp"]
    includes = [Path(pybind11.get_include()), Path(sysconfig.get_paths()["include"])]
    library = shared_library(file_name, sources, includes)
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
