"""A short run of the soak (tests/server/soak.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.server.soak import whole
from tests.slow import slow


@slow
@pytest.mark.timeout(1800)
def test_soak(tmp_path: Path) -> None:
    whole(make_checkpoint(tmp_path / "small", context=128, layers=1), 2000, 200)
