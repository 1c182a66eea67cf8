"""Reads a user's machine model from a file, for example `--machine my.json`. A machine model
describes a device to the planner: processors, memory, rates, kernel variants. `ark info --machine
NAME` prints a built-in model in the format of such a file. A machine file is untrusted data, so it
is checked against the schema of the machine models in plan files. Only the command line calls this
module; plan files cannot refer to machine files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ark.backend import registry
from ark.errors import InvalidUsageError, ModelError, PlanError
from ark.ir import json_reader
from ark.machine import Machine
from ark.plan.schema import read_machine
from ark.plan.serialize import machine_entry

SUFFIX = ".json"
MAX_BYTES = 1 << 20


def machine(name: str) -> Machine:
    """The machine model that a user names: a model of an installed backend, or a file that contains
    one.
    """
    if not name.endswith(SUFFIX):
        return registry.machine(name)
    model = read(name)
    registry.get(model.backend)
    return model


def read(name: str) -> Machine:
    """The machine model in a file; raises InvalidUsageError if the file does not contain one."""
    subject = f"the machine file {name!r}"
    try:
        with Path(name).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InvalidUsageError(f"{subject} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise InvalidUsageError(
            f"{subject} has more than {MAX_BYTES} bytes; a machine has a few KiB"
        )
    try:
        return read_machine(json_reader.read(text, dict[str, Any], subject), subject)
    except (ModelError, PlanError) as error:
        reason = str(error).rstrip(".")
        raise InvalidUsageError(f"{reason}; `ark info --machine h100` prints a template") from error


def write(machine: Machine) -> str:
    """The contents of a machine file for this machine model, as JSON."""
    return json.dumps(machine_entry(machine), indent=2)
