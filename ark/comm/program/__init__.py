"""Collective programs: their frozen form, the builder, dumps, the checker and the NumPy executor.

`ark.comm.program.types` defines what a program means; start there.
"""

from ark.comm.program.builder import IN, OUT, ProgramBuilder
from ark.comm.program.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
)

__all__ = [
    "IN",
    "OUT",
    "Buffer",
    "Collective",
    "CollectiveProgram",
    "Kind",
    "OpRef",
    "Operation",
    "ProgramBuilder",
    "Role",
    "Span",
]
