"""The table of `ark plan --variants`: each phase's predicted time under every kernel variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ark.errors import BaseError
from ark.machine import Machine
from ark.plan.cost import predict
from ark.plan.types import Plan


def predicted_us(plan: Plan) -> dict[str, float]:
    """For each phase the predicted time at which its last task ends, in microseconds."""
    return {
        phase.name: max((span.end for span in predict(plan, number)), default=0.0)
        for number, phase in enumerate(plan.phases)
    }


def variant_table(
    planned: Plan, machine: Machine, plan_for: Callable[[Machine], Sequence[Plan]]
) -> str:
    """The table as text. If the machine has several variants, plans are made for each variant
    separately. A dash stands for a variant with which the model cannot be planned.
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
