"""What the writers of CUDA's own bodies share: their headers, and how their functions are declared.

Bodies that run often and shortly become part of the loop: a called function reaches memory by more
instructions. Those that run seldom, or long, stay functions: they would take registers from it.
"""

from __future__ import annotations

from importlib import resources

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE


def header(name: str) -> str:
    """The text of a .h file of this folder."""
    return resources.files("ark_cuda").joinpath(f"tasks/{name}").read_text()


def leads(machine: Machine) -> bool:
    """True for the variant `roles`, where a body returns whether the processor continues."""
    return machine.variant.role(COMMUNICATE) > 0


def inlined(name: str, call: str, machine: Machine, enters: bool = True, often: bool = True) -> str:
    """A body that makes one call. enters: the callee itself waits for the task in the variant
    `roles`, and returns false if the processor is to leave. often: it is worth registers of the
    loop; else it stays a function.
    """
    kind, lines = "void", f"  {call};\n"
    if leads(machine):
        kind = "bool"
        enter = "  if (!ark_enter(c)) return false;\n"
        lines = f"  return {call};\n" if enters else f"{enter}{lines}  return true;\n"
    form = "ARK_DEVICE" if often else "ARK_BODY"
    return f"{form} {kind} {name}(ArkCtx& c, const ArkTask& t) {{\n{lines}}}\n"


def poll(name: str, call: str) -> str:
    """What the lead warp of the variant `roles` runs before a body."""
    return f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n  {call};\n}}\n"
