"""Writes the C++ source of the loop kernel, the persistent kernel that runs a plan. The writer is
the same for all vendors; a vendor's dialect supplies the parts that differ.
"""

from importlib import resources


def device_text(name: str) -> str:
    """The text of the file `name` in ark/backend/codegen/device, the headers that all vendors
    share.
    """
    return resources.files("ark.backend.codegen").joinpath("device").joinpath(name).read_text()
