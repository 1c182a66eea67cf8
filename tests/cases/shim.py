"""Cases and helpers of tests/rocm_emulator/test_shim.py, which other tests use too."""

from __future__ import annotations

import re


def fences(wanted: str) -> set[str]:
    """The fence, and the stronger ones that older compilers write in its place."""
    return {re.sub("acquire|release", name, wanted) for name in (r"\g<0>", "acq_rel", "sc")}
