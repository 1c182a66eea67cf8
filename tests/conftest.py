"""Fixtures and hooks for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

from ark.errors import SystemError
from tests import cells

pytest.register_assert_rewrite("tests.cases")

# Thresholds of Python's cyclic collector: the number of new objects, less those freed, before a
# collection, and the numbers of collections before older objects are examined. With Python's
# defaults (700, 10, 10), it took an eighth of the CPU time of tests of plans and programs.
COLLECTED_AFTER = (20_000, 50, 50)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables the collector while tests are collected, and exempts all objects that exist after
    the imports of tests and their libraries.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*COLLECTED_AFTER)
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the emulator before the first test that runs on it. A process that waits for another's
    build does so here, where no test's time limit counts.
    """
    emulated = os.environ.get("ARK_ROCM_DEVICE", "").startswith("emulated")
    chosen = [i for i in session.items if emulated or "rocm_emulator" in i.path.parts]
    if session.config.option.collectonly or not chosen:
        return
    from ark_rocm_emulator.device import built

    try:
        built()
    except SystemError:  # the tests that need the emulator report its absence
        return


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Reports the outcome of a test to tests.cells."""
    if report.when == "call":
        cells.finish(report.passed)
