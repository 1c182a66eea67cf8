"""The CPU's dialect (the parts of the generated source that a backend provides): plain C++17, in
which a processor is a thread.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from ark.backend.codegen.dialect import Dialect
from ark_cpu.tasks import BODIES


@cache
def dialect() -> Dialect:
    folder = resources.files("ark_cpu")
    return Dialect(
        name="cpu",
        suffix=".cpp",
        prelude=folder.joinpath("prelude.h").read_text(),
        entry=folder.joinpath("entry.h").read_text(),
        bodies=BODIES,
        shares_loops=True,
    )
