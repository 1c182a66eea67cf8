"""Tests which of a vendor's bodies (device functions) code generation chooses for an op: the first
body of the op's kind that supports its signature.
"""

from __future__ import annotations

import dataclasses

import pytest
from ark_cpu.dialect import dialect

from ark.backend import registry
from ark.backend.codegen.bodies import Bodies, body_scratch
from ark.backend.codegen.body import Body
from ark.errors import PlanError
from ark.machine import Machine
from ark.machine.variant import COMPUTE, MOVE, Role, Variant
from ark.plan.kind import OperandType, Signature
from ark.plan.types import PlanOp

MACHINE = registry.machine("cpu-2")
OPERANDS = tuple(OperandType("fp32", (1, 1, 1, 8), (8, 8, 8, 1)) for _ in range(2))
BULK = Signature("bulk", {}, OPERANDS)


class Named(Body):
    """A body that supports operands up to a given number of elements."""

    kind = "bulk"

    def __init__(self, text: str, most: int) -> None:
        self.text, self.most = text, most

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return sig.operands[0].shape[-1] <= self.most

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return f"void {name}() {{ {self.text} }}\n"

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return 1000 * self.most


class Mover(Named):
    """The body of the class above, for the moving warps (warps that copy data while others
    multiply).
    """

    moves = True


def test_first_body_that_serves_is_taken() -> None:
    few, many = Named("few", 4), Named("many", 8)
    listed = dataclasses.replace(dialect(), bodies=(Mover("moved", 8), few, many, Named("last", 9)))
    assert listed.body(BULK, MACHINE) is many
    assert body_scratch(BULK, MACHINE, listed) == 8000
    bodies = Bodies(MACHINE, listed, 1)
    bodies.add(PlanOp(0, "op", "bulk", {}, ()), BULK)
    assert bodies.texts == ["void task_0_bulk() { many }\n"]


def test_body_of_another_kind_or_variant_is_not_used() -> None:
    listed = dataclasses.replace(dialect(), bodies=(Mover("moved", 8), Named("few", 4)))
    assert listed.body(BULK, MACHINE) is None
    assert listed.body(dataclasses.replace(BULK, kind="combine"), MACHINE, moves=True) is None
    assert listed.body(BULK, MACHINE, moves=True) is listed.bodies[0]


def test_op_of_moving_warps_needs_a_body_for_them() -> None:
    variant = Variant("matrix", (Role(COMPUTE, 8), Role(MOVE, 3)))
    machine = dataclasses.replace(registry.machine("h100"), variants=(variant,))
    sig = dataclasses.replace(BULK, params={"moved": True})
    bodies = Bodies(machine, dataclasses.replace(dialect(), bodies=(Named("few", 8),)), 1)
    with pytest.raises(PlanError, match="op 'op' is assigned to moving warps"):
        bodies.add(PlanOp(0, "op", "bulk", {}, ()), sig)
