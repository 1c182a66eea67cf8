"""The `backend` fixture: the same test bodies run on a device of each backend.

A backend without a device is skipped with the probe's reason, unless ARK_REQUIRE promises one:
ARK_REQUIRE=cuda:1 (several separated by commas) turns the skip into a failure. Simulated backends
run these tests only if ARK_REQUIRE names them; test_mesh.py covers one in `nox`. If such a backend
refuses a test's program with an error that contains the backend's name, the test is skipped with
the message.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

import ark
from ark.backend import registry
from ark.errors import UnsupportedError
from tests.emulated import places

NAMES = ("cpu", "cuda", "rocm")
SIMULATED = ("mesh",)
OPTIMISED = (
    "test_attention_equals_torch",
    "test_matmul",
    "test_reductions",
    "test_chains_become_one_op",
    "test_functions_are_accurate_over_their_range",
    "test_sums_and_products_of_an_expression_keep_their_order",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that are marked for another part of the emulated devices than
    ARK_EMULATED_PART.
    """
    part = os.environ.get("ARK_EMULATED_PART")
    here = Path(__file__).parent
    marked = {item: places(item) for item in items if here in item.path.parents}
    left = [item for item, words in marked.items() if part and any(w != part for w in words)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def required(name: str) -> int:
    """Returns how many devices of a backend ARK_REQUIRE promises."""
    for word in os.environ.get("ARK_REQUIRE", "").split(","):
        backend, _, count = word.partition(":")
        if backend == name:
            return int(count or 1)
    return 0


@pytest.fixture(scope="module")
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields the architecture of an emulated device with all checks. Tests choose it by indirect
    parameters.
    """
    emulator = pytest.importorskip("ark_rocm_emulator")
    with emulator.emulated(request.param, checks=1):
        yield request.param


@pytest.fixture(params=(*NAMES, *(name for name in SIMULATED if required(name))))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Yields the name of a backend for which ark is initialised."""
    name = str(request.param)
    device_count, reason = 0, "it is not installed"
    if name in registry.names():
        probe = registry.get(name).probe()
        device_count, reason = len(probe.devices), probe.reason
    if device_count < max(1, required(name)):
        message = f"backend {name!r} has {device_count} devices: {reason or 'fewer than promised'}"
        if required(name):
            pytest.fail(message)
        pytest.skip(message)
    ark.init(backend=name)
    yield name
    ark.init(backend=name)


@pytest.fixture(autouse=True)
def optimised(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests compile with ark's own compiler flags, although ARK_CPU_FLAGS selects a quick build for
    other tests.
    """
    if request.node.originalname in OPTIMISED:
        monkeypatch.delenv("ARK_CPU_FLAGS", raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    try:
        return (yield)
    except UnsupportedError as error:
        if any(f"the backend {name!r}" in str(error) for name in SIMULATED):
            pytest.skip(str(error))
        raise
