"""Collective programs: their frozen form, the builder, dumps, the checker and the NumPy executor.

`ark.collective.programs.types` defines the meaning of a program; start there. Other libraries'
formats are imported when one of their functions is used.
"""

import importlib
from typing import Any

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
    "from_json",
    "in_order",
    "reference_result",
    "steps",
    "to_json",
    *_FORMS,
]
