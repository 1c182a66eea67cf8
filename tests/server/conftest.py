"""Servers for the tests. Without the packages of the extra `serve` the tests are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.running import Running
    from tests.server.stand_in import CountingEngine

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "jinja2", "httpx", "openai")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture
def engine() -> Iterator[CountingEngine]:
    """An engine without a model, a millisecond an iteration."""
    from tests.server.stand_in import CountingEngine

    counting = CountingEngine(step_s=0.001)
    yield counting
    counting.close()


@pytest.fixture
def server(engine: CountingEngine) -> Iterator[Running]:
    """A server on that engine."""
    from tests.server.running import noah_model, running

    with running(engine, noah_model(engine.context)) as started:
        yield started
