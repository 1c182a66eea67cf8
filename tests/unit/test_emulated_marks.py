"""Markers that select tests for emulated devices have the documented names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.emulated import PLACES, places

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MATRIX = Path(__file__).resolve().parents[2] / "ci/matrix.toml"


@pytest.mark.parametrize("words", [("gfx9000",), ()])
def test_unknown_place_is_refused(request: pytest.FixtureRequest, words: tuple[str, ...]) -> None:
    request.node.add_marker(pytest.mark.emulated("gfx942"))
    assert places(request.node) == ["gfx942"]
    request.node.add_marker(pytest.mark.emulated(*words))
    with pytest.raises(pytest.UsageError, match=r"test_unknown_place_is_refused.* is marked"):
        places(request.node)


def test_places_are_the_architectures_of_the_default_run() -> None:
    runs = tomllib.loads(MATRIX.read_text())["emulated"]
    assert {*PLACES} == {"slow", *(run["arch"] for run in runs if "session" not in run)}
