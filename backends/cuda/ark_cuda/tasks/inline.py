"""Functions that the writers of CUDA's specialised bodies share: they find the bodies' headers and
declare their functions.

Bodies that run often and briefly are inlined into the loop, because a called function needs more
instructions to reach memory. Bodies that run seldom or long stay functions, because they would take
registers from the loop.
"""

from __future__ import annotations

from importlib import resources

from ark.machine import Machine
from ark.machine.variant import COMMUNICATE


def header(name: str) -> str:
    """The text of the header file `name` of this folder."""
    return resources.files("ark_cuda").joinpath(f"tasks/{name}").read_text()


def leads(machine: Machine) -> bool:
    """True in the variant `roles`, in which a communicating ("leading") warp waits for the tasks,
    and a body returns false if the processor must leave the loop.
    """
    return machine.variant.role(COMMUNICATE) > 0


def inlined(name: str, call: str, machine: Machine, enters: bool = True, often: bool = True) -> str:
    """The source of a body that is a single call. enters: True if the callee itself waits for the
    task in the variant `roles` and returns false if the processor must leave. often: True to inline
    the body into the loop, whose registers it then uses; False to emit a function that the loop
    calls.
    """
    kind, lines = "void", f"  {call};\n"
    if leads(machine):
        kind = "bool"
        enter = "  if (!ark_enter(c)) return false;\n"
        lines = f"  return {call};\n" if enters else f"{enter}{lines}  return true;\n"
    form = "ARK_DEVICE" if often else "ARK_BODY"
    return f"{form} {kind} {name}(ArkCtx& c, const ArkTask& t) {{\n{lines}}}\n"


def poll(name: str, call: str) -> str:
    """The source of NAME_poll, which the communicating warp of the variant `roles` runs before the
    body's tasks begin. call: the call that waits.
    """
    return f"ARK_DEVICE void {name}_poll(ArkCtx& c, const ArkTask& t) {{\n  {call};\n}}\n"
