"""Writes the loop kernel: one writer, a dialect per vendor, a function per kind and signature."""

from importlib import resources


def device_text(name: str) -> str:
    """The text of a .h file that all vendors share."""
    return resources.files("ark.codegen").joinpath("device").joinpath(name).read_text()
