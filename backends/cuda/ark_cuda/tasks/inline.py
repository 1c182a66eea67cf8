"""What the writers of CUDA's own bodies share: inlining, and the text for loading packets."""

from __future__ import annotations

from importlib import resources


def inlined(function: str) -> str:
    """Makes a body part of the loop: a called function reaches memory by more instructions.

    Bodies that run seldom, or long, stay functions: they would take registers from the loop.
    """
    return function.replace("ARK_BODY", "ARK_DEVICE", 1)


def packets() -> str:
    """Declares ark_load_by_warp, once for a source."""
    return resources.files("ark_cuda").joinpath("tasks/packets.h").read_text()
