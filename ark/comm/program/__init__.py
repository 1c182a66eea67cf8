"""Collective programs: their frozen form, the builder, dumps, the checker and the NumPy executor.

`ark.comm.program.types` defines what a program means; start there.
"""

from ark.comm.program.builder import IN, OUT, ProgramBuilder
from ark.comm.program.checker import Report, check
from ark.comm.program.execute import execute, reference_result
from ark.comm.program.msccl import to_xml
from ark.comm.program.order import final_writers, in_order, steps
from ark.comm.program.reductions import REDUCTIONS
from ark.comm.program.text import dump, from_json, to_json
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
    "REDUCTIONS",
    "Buffer",
    "Collective",
    "CollectiveProgram",
    "Kind",
    "OpRef",
    "Operation",
    "ProgramBuilder",
    "Report",
    "Role",
    "Span",
    "check",
    "dump",
    "execute",
    "final_writers",
    "from_json",
    "in_order",
    "reference_result",
    "steps",
    "to_json",
    "to_xml",
]
