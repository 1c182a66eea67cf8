"""Every test of this folder starts with an empty model on the CPU backend."""

from __future__ import annotations

import pytest

import ark


@pytest.fixture(autouse=True)
def fresh() -> None:
    ark.init(backend="cpu", rank=0, world_size=1)
