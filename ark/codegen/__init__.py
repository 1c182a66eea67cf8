"""Writes the source of the loop kernel: one writer, one dialect per vendor, one function per kind
and signature.
"""

from importlib import resources


def device_text(name: str) -> str:
    """The text of a .h file that all vendors share."""
    return resources.files("ark.codegen").joinpath("device").joinpath(name).read_text()
