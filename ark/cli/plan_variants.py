"""Writes the table of `ark plan --variants`: the predicted time of each phase under every kernel
variant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ark.errors import BaseError
from ark.machine import Machine
from ark.plan.cost import phase_us
from ark.plan.types import Plan


def predicted_us(plan: Plan) -> dict[str, float]:
    """The predicted microseconds of each phase, by the phase's name."""
    return {phase.name: phase_us(plan, number) for number, phase in enumerate(plan.phases)}


def variant_table(
    planned: Plan, machine: Machine, plan_for: Callable[[Machine], Sequence[Plan]]
) -> str:
    """The table of predicted times as text, with a column for each kernel variant. For each column,
    the model is planned again for the machine with only this variant. A dash marks a variant with
    which the model cannot be planned.
    """
    names = tuple(dict.fromkeys(variant.name for variant in machine.variants))
    columns: dict[str, Mapping[str, float]] = {}
    for name in names if len(names) > 1 else ():
        try:
            columns[name] = predicted_us(plan_for(machine.using(name))[0])
        except BaseError:
            columns[name] = {}
    lines = ["predicted us of a phase, by kernel variant (*: the plan's)"]
    lines.append((f"  {'phase':<12}" + "".join(f"{name:>12} " for name in names)).rstrip())
    own = predicted_us(planned)
    for phase in planned.phases:
        chosen = str(planned.machine["variants"][phase.variant]["name"])
        cells = []
        for name in names:
            us = own[phase.name] if name == chosen else columns[name].get(phase.name)
            cells.append(
                f"{'-' if us is None else f'{us:.1f}':>12}{'*' if name == chosen else ' '}"
            )
        lines.append((f"  {phase.name:<12}" + "".join(cells)).rstrip())
    return "\n".join(lines) + "\n"
