"""How a body that every layer of a decoder runs is compiled. Called by its writers."""

from __future__ import annotations


def inlined(function: str) -> str:
    """Makes part of the loop of a body: a called function reaches memory by more instructions.

    Bodies that run seldom, or long, stay functions: they would take registers from the loop.
    """
    return function.replace("ARK_BODY", "ARK_DEVICE", 1)
