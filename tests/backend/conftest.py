"""One fixture that gives a backend with a device: the same test bodies run on each.

A backend without a device is skipped, with the probe's reason, unless ARK_REQUIRE promises it:
ARK_REQUIRE=cuda:1 (several separated by commas) turns the skip into a failure. Simulated backends
take part only where it names them; test_mesh.py has what a default run sees of one. What they
refuse by their name is skipped, with their words.
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
    "test_attention_is_torchs",
    "test_matmul",
    "test_reductions",
    "test_chains_become_one_op",
    "test_functions_are_accurate_over_their_range",
    "test_sums_and_products_of_an_expression_keep_their_order",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests that are marked for another emulated device than the default run uses."""
    part = os.environ.get("ARK_EMULATED_PART")
    here = Path(__file__).parent
    marked = {item: places(item) for item in items if here in item.path.parents}
    left = [item for item, words in marked.items() if part and any(w != part for w in words)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def required(name: str) -> int:
    """How many devices of a backend the machine promises to have."""
    for word in os.environ.get("ARK_REQUIRE", "").split(","):
        backend, _, count = word.partition(":")
        if backend == name:
            return int(count or 1)
    return 0


@pytest.fixture(scope="module")
def arch(request: pytest.FixtureRequest) -> Iterator[str]:
    """The architecture of an emulated device that runs with all checks; given by the tests."""
    emulator = pytest.importorskip("ark_rocm_emulator")
    with emulator.emulated(request.param, checks=1):
        yield request.param


@pytest.fixture(params=(*NAMES, *(name for name in SIMULATED if required(name))))
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a backend that ark was initialised with."""
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
    """Some run what ark's own flags make also where all others are compiled quickly."""
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
