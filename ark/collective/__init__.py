"""Collective programs: their frozen form, the builder, dumps, the checker and the NumPy executor.

`ark.collective.types` defines what a program means; start there.
"""

from ark.collective.builder import IN, OUT, ProgramBuilder
from ark.collective.checker import Report, check
from ark.collective.execute import execute, reference_result
from ark.collective.execution_read import from_execution_plan
from ark.collective.execution_write import to_execution_plan
from ark.collective.msccl import TARGETS, to_xml
from ark.collective.msccl_read import from_xml
from ark.collective.order import final_writers, in_order, steps
from ark.collective.reductions import REDUCTIONS
from ark.collective.text import dump, from_json, to_json
from ark.collective.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Counts,
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
    "TARGETS",
    "Buffer",
    "Collective",
    "CollectiveProgram",
    "Counts",
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
    "from_execution_plan",
    "from_json",
    "from_xml",
    "in_order",
    "reference_result",
    "steps",
    "to_execution_plan",
    "to_json",
    "to_xml",
]
