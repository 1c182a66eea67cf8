"""Shared functions for the writers of CUDA's specialised bodies: they find the bodies' headers and
declare their functions.

Bodies that run often and briefly are inlined into the loop, because a called function needs more
instructions to reach memory. Bodies that run seldom or long remain functions, because inlined
bodies would take registers from the loop.
"""

from __future__ import annotations

from importlib import resources

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE


def header(name: str) -> str:
    """The text of the header file `name` of this folder."""
    return resources.files("ark_cuda").joinpath(f"tasks/{name}").read_text()


def leads(machine: Machine) -> bool:
    """True in the variant `roles`. There a communicating ("lead") warp waits for the tasks, and a
    body returns false if the processor must leave the loop.
    """
    return machine.variant.role(COMMUNICATE) > 0


def inlined(name: str, call: str, machine: Machine, enters: bool = True, often: bool = True) -> str:
    """The source of a body that consists of one call. enters: True if the called function itself
    waits for the task in the variant `roles` and returns false if the processor must leave the
    loop. often: True to inline the body into the loop, whose registers it then uses; False to emit
    a function that the loop calls.
    """
    kind, lines = "void", f"  {call};\n"
    if leads(machine):
        kind = "bool"
        enter = "  if (!ark_enter(c)) return false;\n"
        lines = f"  return {call};\n" if enters else f"{enter}{lines}  return true;\n"
    form = "ARK_DEVICE" if often else "ARK_BODY"
    return f"{form} {kind} {name}(ArkCtx& c, const ArkTask& t) {{\n{lines}}}\n"


def poll(name: str, call: str) -> str:
    """The source of NAME_poll. The communicating warp of the variant `roles` runs it before a task
    of this body begins. call: the call that waits.
    """
    return f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n  {call};\n}}\n"
