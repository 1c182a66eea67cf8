"""What is slow and rarely fails: the default run leaves it out, `nox -s slow` runs it."""

from __future__ import annotations

import os

import pytest

SLOW = os.environ.get("ARK_SLOW_TESTS") == "1"
slow = pytest.mark.skipif(not SLOW, reason="slow: nox -s slow runs it")
