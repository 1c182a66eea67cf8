"""The choice of a token where the candidates are packets: before its task's waits (Dialect.enters).

Settings, position and stop tokens are older than the iteration, and reading a packet is waiting
for it (ark/tasks/tokens.h). Called by the writer through the dialect.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks.tokens import choice

CANDIDATES = 3


def serves(sig: Signature, machine: Machine) -> bool:
    """Whether this body takes the signature."""
    return machine.variant.name == "block" and sig.operands[CANDIDATES].packet


def write(name: str, sig: Signature, machine: Machine) -> str | None:
    """The body's source, or None where the common body serves."""
    if not serves(sig, machine):
        return None
    call = choice("ark_choose_early", sig)
    return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"
