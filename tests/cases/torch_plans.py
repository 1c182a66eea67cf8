"""Plans that torch.compile makes for a machine that is not present."""

from __future__ import annotations

from typing import Any

import torch

from ark.backend import registry
from ark.interop.torch.planning import Planning
from ark.plan.types import Plan


def planned(*given: Any, **named: Any) -> Plan:
    """The plan of a model for a machine. The arguments are those of Planning."""
    return Planning(*given, **named).finish()


def planned_as(module: Any, example: Any, machine: str, monkeypatch: Any) -> list[Any]:
    """Returns the plans of torch.compile for a named machine. The kernels that run are planned for
    the CPU.
    """
    from ark.interop.torch import program

    plans: list[Any] = []

    def plan_twice(model: Any, places: Any, own: Any, *rest: Any, **named: Any) -> Any:
        plans.append(planned(model, places, registry.machine(machine), *rest, **named))
        return Planning(model, places, own, *rest, **named)

    monkeypatch.setattr(program, "Planning", plan_twice)
    with torch.no_grad():
        torch.testing.assert_close(
            torch.compile(module, backend="ark")(example), module(example), rtol=2e-2, atol=2e-2
        )
    return plans
