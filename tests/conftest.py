"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

# Objects that are made, less those that are gone, before Python's cyclic collector looks again, and
# how often it has looked before it looks at older ones. It took an eighth of the processor time of
# tests of plans and programs with its own 700, 10 and 10.
COLLECTED_AFTER = (20_000, 50, 50)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collector rests while tests are found, and leaves alone what importing all of them and
    their libraries has made.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECTED_AFTER)
        gc.enable()
