"""Changes numbers of a machine model for experiments, for example `ark bench decode --set
FIELD=NUMBER`.
"""

from __future__ import annotations

import dataclasses
import re

from ark.errors import InvalidUsageError
from ark.machine import Machine
from ark.machine.variant import Variant
from ark.plan.schema import read_machine


def _numbers(value: Machine | Variant) -> set[str]:
    """Names of the fields that hold a number."""
    names = {f.name for f in dataclasses.fields(value)}
    return {n for n in names - {"lanes"} if isinstance(getattr(value, n), (int, float))}


def change(machine: Machine, settings: list[str]) -> Machine:
    """Returns the machine model with the FIELD=NUMBER pairs applied to it and to its kernel
    variants.
    """
    ring = _numbers(machine.variant)
    numbers = ring | _numbers(machine)
    changes = {}
    for text in settings:
        name, _, value = text.partition("=")
        if name not in numbers or not re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", value):
            raise InvalidUsageError(
                f"--set {text} is not understood; write FIELD=NUMBER with a field of "
                f"{', '.join(sorted(numbers))}"
            )
        changes[name] = float(value) if "." in value else int(value)
    shape = {k: int(v) for k, v in changes.items() if k in ring}
    rest = {k: v for k, v in changes.items() if k not in ring}
    changed = dataclasses.replace(machine.shaped(**shape), **rest)  # type: ignore[arg-type]
    return read_machine(dataclasses.asdict(changed))
