"""A short run of the soak (tests/server/soak.py), and its requests with extreme sampling."""

from __future__ import annotations

from pathlib import Path

import pytest

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.server.soak import EXTREME_COUNT, extreme_fields, whole
from tests.slow import slow


def test_extreme_requests_are_sound_about_as_often_as_not() -> None:
    def sound(number: int) -> bool:
        try:
            SamplingParams(**extreme_fields(number))
        except InvalidUsageError:
            return False
        return True

    assert 0.2 < sum(map(sound, range(EXTREME_COUNT))) / EXTREME_COUNT < 0.8


@slow
@pytest.mark.timeout(1800)
def test_soak(tmp_path: Path) -> None:
    whole(make_checkpoint(tmp_path / "small", context=128, layers=1), 2000, 200)
