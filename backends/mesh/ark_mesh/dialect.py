"""The mesh's dialect. It is the CPU's dialect with another entry point, because a core runs one
task at a time, as a thread does.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from importlib import resources

from ark_cpu.dialect import dialect as cpu

from ark.backend.codegen.dialect import Dialect


@cache
def dialect() -> Dialect:
    entry = resources.files("ark_mesh").joinpath("entry.h").read_text()
    return dataclasses.replace(cpu(), name="mesh", entry=entry, shares_loops=False)
