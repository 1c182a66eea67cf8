"""Writes the C++ source of the loop kernel (the persistent kernel that runs a plan). One writer
serves all vendors. A vendor's dialect supplies the parts that differ.
"""

from importlib import resources


def device_text(name: str) -> str:
    """The text of a .h file that all vendors share."""
    return resources.files("ark.codegen").joinpath("device").joinpath(name).read_text()
