"""Collective programs: the type of a program, its builder, its text form, the checker and the NumPy
executor. `ark.collective.programs.types` defines the meaning of a program; start there. The formats
of other libraries are imported when one of their functions is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from ark.collective.programs.builder import IN, OUT, ProgramBuilder
from ark.collective.programs.checker import Report, check
from ark.collective.programs.execute import execute, reference_result
from ark.collective.programs.order import final_writers, in_order, steps
from ark.collective.programs.reductions import REDUCTIONS
from ark.collective.programs.text import dump, from_json, to_json
from ark.collective.programs.types import (
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

if TYPE_CHECKING:
    from ark.collective.programs.execution_read import from_execution_plan
    from ark.collective.programs.execution_write import to_execution_plan
    from ark.collective.programs.files import read_program
    from ark.collective.programs.msccl import TARGETS, to_xml
    from ark.collective.programs.msccl_read import from_xml

_FORMS = {
    "TARGETS": "msccl",
    "from_execution_plan": "execution_read",
    "from_xml": "msccl_read",
    "read_program": "files",
    "to_execution_plan": "execution_write",
    "to_xml": "msccl",
}


def __getattr__(name: str) -> Any:
    if name in _FORMS:
        return getattr(importlib.import_module(f"ark.collective.programs.{_FORMS[name]}"), name)
    raise AttributeError(f"module 'ark.collective.programs' has no attribute {name!r}")


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
    "read_program",
    "reference_result",
    "steps",
    "to_execution_plan",
    "to_json",
    "to_xml",
]
