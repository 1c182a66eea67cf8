"""Servers for the tests: of an engine without a model, and of real ones on the CPU."""

from __future__ import annotations

import pytest

for package in ("starlette", "uvicorn", "prometheus_client", "httpx", "openai"):
    pytest.importorskip(package)
