"""Chooses the next token if the candidates are packets. The body begins before its task's waits
(Body.enters).

This is safe because settings, position and stop tokens were written before the iteration, and
because reading a packet includes the wait for it (ark/tasks/tokens.h). Called by the source writer
through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks.tokens import choice

CANDIDATES_OPERAND = 3


class EarlyChoice(Body):
    """Chooses the next token. The body starts before its task has waited for its counters."""

    kind = "choose"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return machine.variant.name == "block" and sig.operands[CANDIDATES_OPERAND].packet

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        call = choice("ark_choose_early", sig)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
