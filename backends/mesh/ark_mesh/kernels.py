"""Compiles the cores' code with the CPU's compiler and a dialect that has the mesh's entry
point.
"""

from __future__ import annotations

from ark_cpu import CpuBackend

from ark.backend.codegen.dialect import Dialect
from ark_mesh.dialect import dialect


class MeshKernels(CpuBackend):
    """The internal backend that ark.runtime.program compiles with."""

    name = "mesh"

    def dialect(self, arch: str) -> Dialect:
        return dialect()
