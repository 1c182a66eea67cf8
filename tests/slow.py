"""What the default run leaves out, or does less of, because it is slow and rarely fails.

`slow` marks a test that only `nox -s slow` runs (`pytest -m slow`); `examples` says how many random
cases a test looks at, all of them in that session, a part in the default run.
"""

from __future__ import annotations

import os

import pytest

SLOW = os.environ.get("ARK_SLOW_TESTS") == "1"
slow = pytest.mark.slow


def examples(count: int) -> int:
    """So many random cases in the slow session, a fifth of them in the default run."""
    return count if SLOW else -(-count // 5)
