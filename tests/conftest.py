"""What holds for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

from ark.errors import SystemError
from tests import cells

pytest.register_assert_rewrite("tests.cases")

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


def pytest_collection_finish(session: pytest.Session) -> None:
    """The emulator is built before the first test that runs on it: processes that wait for
    another's build do so here, where no test's time limit counts.
    """
    emulated = os.environ.get("ARK_ROCM_DEVICE", "").startswith("emulated")
    chosen = [i for i in session.items if emulated or "rocm_emulator" in i.path.parts]
    if session.config.option.collectonly or not chosen:
        return
    from ark_rocm_emulator.device import built

    try:
        built()
    except SystemError:  # the tests that need it say so
        return


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tells tests.cells how a test has ended."""
    if report.when == "call":
        cells.finish(report.passed)
