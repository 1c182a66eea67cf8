"""Reads the device headers of this folder."""

from __future__ import annotations

from importlib import resources


def read(*names: str) -> tuple[str, ...]:
    """The texts of the device headers in this folder."""
    return tuple((resources.files("ark_rocm") / "tasks" / name).read_text() for name in names)
