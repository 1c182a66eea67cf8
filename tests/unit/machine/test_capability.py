"""Capabilities are members of one enum. A string is refused where it is passed."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.lower.engines import choose_engine
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan import schema
from ark.plan.serialize import machine_entry
from tests.unit.plan.shapes import machine

MODELS = ("h200", "b200", "a100", "mi300x", "rx7900xtx", "cpu-2")


def test_members_have_a_description_and_keep_their_value() -> None:
    assert all(len(c.meaning) > 10 and c.value == c.name.lower() for c in Capability)
    assert all(pickle.loads(pickle.dumps(c)) is c for c in Capability)


def test_string_is_not_a_capability() -> None:
    """A capability that is given as a string is refused. Otherwise a misspelt one would count as
    missing, without an error.
    """
    model = registry.machine("h200")
    assert model.has(Capability.WGMMA)
    assert not model.has(Capability.MFMA)
    for word in ("wgmma", "wgma"):
        with pytest.raises(TypeError, match=word):
            model.has(word)  # type: ignore[arg-type]


def test_machine_is_made_of_members() -> None:
    with pytest.raises(PlanError, match=r"'wgma'.*choose one of .*wgmma"):
        machine(2, "wgma")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"use Capability\.WGMMA"):
        machine(2, "wgmma")  # type: ignore[arg-type]


def test_plan_file_names_known_ones() -> None:
    entry = machine_entry(registry.machine("h200"))
    entry["capabilities"] = ["packets", "wgma"]
    with pytest.raises(PlanError, match=r"'wgma'.*choose one of .*wgmma"):
        schema.read_machine(entry)
    entry["capabilities"] = [7]
    with pytest.raises(PlanError, match="capability 7 does not exist"):
        schema.read_machine(entry)


@pytest.mark.parametrize("name", MODELS)
def test_machine_is_read_back_from_its_json(name: str) -> None:
    model = registry.machine(name)
    entry = machine_entry(model)
    assert entry["capabilities"] == [c.value for c in model.capabilities]
    assert schema.read_machine(entry) == model


def test_capabilities_can_be_added_and_removed() -> None:
    model: Machine = machine(2, Capability.PACKETS)
    more = model.with_capabilities(Capability.CLAIMS, Capability.PACKETS)
    assert more.capabilities == (*model.capabilities, Capability.CLAIMS)
    assert more.without_capabilities(Capability.CLAIMS) == model


def test_no_module_asks_for_a_single_thread() -> None:
    """Only ark.machine reads Capability.SINGLE_THREAD. Other modules query whether threads share a
    task (`Machine.cooperative`); every other difference between machines is a cost or a separate
    capability.
    """
    root = Path(ark.__file__).parent
    asking = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "Capability.SINGLE_THREAD" in path.read_text()
    ]
    assert asking == ["machine/__init__.py"]


@pytest.mark.parametrize("name", MODELS)
def test_lanes_and_shared_tasks_agree(name: str) -> None:
    model = registry.machine(name)
    assert model.coalesces == model.cooperative


def test_machine_of_single_threads_may_differ_in_the_rest() -> None:
    model = registry.machine("cpu-2")
    own = model.without_capabilities(Capability.HOST_MEMORY, Capability.ONE_PRODUCT_BODY)
    assert not own.cooperative and own.has(Capability.STARTS_PROCESSORS)
    assert choose_engine(model, 1 << 16).name == "threads"
    costs = dataclasses.replace(model.costs, packet_bytes=1 << 20)
    assert choose_engine(dataclasses.replace(model, costs=costs), 1 << 16).name == "packet"
