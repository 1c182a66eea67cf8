"""Cases and helpers of tests/rocm_emulator/test_shim.py, which other tests use too."""

from __future__ import annotations

import re


def fences(wanted: str) -> set[str]:
    """Returns the names of a memory fence and of the stronger fences that older compilers emit in
    its place.
    """
    return {re.sub("acquire|release", name, wanted) for name in (r"\g<0>", "acq_rel", "sc")}
