"""Fixtures and hooks for all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from ark.errors import SystemError
from tests import cells, long

pytest.register_assert_rewrite("tests.cases")

# Thresholds of Python's cyclic collector: the number of new objects, less those freed, before a
# collection, and the numbers of collections before older objects are examined. With Python's
# defaults (700, 10, 10), it took an eighth of the CPU time of tests of plans and programs.
COLLECTED_AFTER = (20_000, 50, 50)


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "tests to run (tests/long.py); default: all with paths, `default` without paths"
    parser.addoption("--part", choices=long.PARTS, help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the part of the tests to run (default or long); xdist passes the choice to its
    workers.
    """
    if config.option.part is None:
        paths = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        config.option.part = long.ALL if paths else long.DEFAULT


def pytest_report_header(config: pytest.Config) -> str:
    return f"part: {config.option.part} (tests/long.py)"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If only long tests are to run, skips the import of files that have none."""
    if config.option.part != long.LONG or collection_path.suffix != ".py":
        return None
    return collection_path.relative_to(long.ROOT).as_posix() not in long.files() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects the tests of the part (default or long) that is not to run."""
    left = [item for item in items if not long.runs(config.option.part, item.nodeid)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if long.runs(config.option.part, item.nodeid)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disables Python's garbage collector while pytest collects tests. Objects that exist then,
    most of them from imports, are exempt from later collections.
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
    build does so here, where no test's time limit applies.
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


@pytest.fixture(autouse=True)
def one_rank() -> Generator[None, None, None]:
    """Restores rank 0 of 1 after a test that set another, so that a later test of the same process
    plans for one rank.
    """
    yield
    from ark.frontend.model import Model

    if (Model._rank, Model._world_size, Model._device_id) != (0, None, 0):
        Model.reset()
        Model._rank, Model._world_size, Model._device_id = 0, None, 0


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Reports the outcome of a test to tests.cells."""
    if report.when == "call":
        cells.finish(report.passed)
