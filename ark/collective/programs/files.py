"""Reads programs from files in ark's JSON, MSCCL's XML, or the format of MSCCL++ execution plans.
The content determines the format. Called by the command line and ark.distributed.
"""

from __future__ import annotations

from ark.collective.programs.checker import check
from ark.collective.programs.execution_read import from_execution_plan
from ark.collective.programs.msccl_read import from_xml
from ark.collective.programs.text import from_json
from ark.collective.programs.types import CollectiveProgram


def read_program(text: str) -> CollectiveProgram:
    """Reads and checks the program in a file's content. Raises the errors of the format's reader
    and of `check`.
    """
    if text.lstrip().startswith("<"):
        program = from_xml(text)
    else:
        program = from_execution_plan(text) if '"gpus"' in text else from_json(text)
    check(program)
    return program
