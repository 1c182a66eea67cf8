"""How the cores' code is made: the CPU's compiler and a dialect with the mesh's entry point."""

from __future__ import annotations

from ark_cpu import CpuBackend

from ark.codegen.dialect import Dialect
from ark_mesh.dialect import dialect


class MeshKernels(CpuBackend):
    """The backend that ark.runtime.program compiles with; no user sees it."""

    name = "mesh"

    def dialect(self, arch: str) -> Dialect:
        return dialect()
