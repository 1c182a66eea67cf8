"""A short run of the soak (tests/serving/soak.py)."""

from __future__ import annotations

from pathlib import Path

from ark.models.checkpoint import Checkpoint
from tests.checkpoints import make_checkpoint
from tests.serving.soak import soak
from tests.slow import slow


@slow
def test_ten_thousand_requests(tmp_path: Path) -> None:
    soak(Checkpoint.open(make_checkpoint(tmp_path / "small", layers=1, hidden=32)), 10_000)
