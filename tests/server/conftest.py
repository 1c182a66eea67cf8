"""Servers for the tests. Without the packages of the extra `serve` the tests are not collected."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.server.running import Running
    from tests.server.stand_in import CountingEngine

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "jinja2", "httpx", "openai")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []


@pytest.fixture(scope="package", autouse=True)
def no_certificates() -> Iterator[None]:
    """Sets the environment so that TLS certificates are read from an empty folder. Each client of
    these servers, none of which uses TLS, would otherwise read all certificates of the system.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(Path(__file__).parent))
        yield


@pytest.fixture
def engine() -> Iterator[CountingEngine]:
    """Yields an engine without a model that takes a millisecond for each iteration."""
    from tests.server.stand_in import CountingEngine

    counting = CountingEngine(step_s=0.001)
    yield counting
    counting.close()


@pytest.fixture
def server(engine: CountingEngine) -> Iterator[Running]:
    """Yields a server whose engine is the fixture `engine`."""
    from tests.server.running import noah_model, running

    with running(engine, noah_model(engine.context)) as started:
        yield started
