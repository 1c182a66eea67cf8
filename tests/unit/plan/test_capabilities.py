"""Capabilities are members of one enum: a word that is none is refused where it stands."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan import schema
from ark.plan.serialize import machine_entry
from tests.unit.plan.shapes import machine

MODELS = ("h200", "b200", "a100", "mi300x", "rx7900xtx", "cpu-2")


def test_members_have_a_meaning_and_keep_their_word() -> None:
    assert all(len(c.meaning) > 10 and c.value == c.name.lower() for c in Capability)
    assert all(pickle.loads(pickle.dumps(c)) is c for c in Capability)


def test_a_word_is_no_question() -> None:
    """It would be quietly false where it is misspelt."""
    model = registry.machine("h200")
    assert model.has(Capability.WGMMA)
    assert not model.has(Capability.MFMA)
    for word in ("wgmma", "wgma"):
        with pytest.raises(TypeError, match=word):
            model.has(word)  # type: ignore[arg-type]


def test_a_machine_is_made_of_members() -> None:
    with pytest.raises(PlanError, match=r"'wgma'.*known ones are .*wgmma"):
        machine(2, "wgma")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"give Capability\.WGMMA"):
        machine(2, "wgmma")  # type: ignore[arg-type]


def test_a_plan_file_names_known_ones() -> None:
    entry = machine_entry(registry.machine("h200"))
    entry["capabilities"] = ["packets", "wgma"]
    with pytest.raises(PlanError, match=r"'wgma'.*known ones are .*wgmma"):
        schema.read_machine(entry)
    entry["capabilities"] = [7]
    with pytest.raises(PlanError, match="named 7"):
        schema.read_machine(entry)


@pytest.mark.parametrize("name", MODELS)
def test_a_machine_comes_back_from_its_words(name: str) -> None:
    model = registry.machine(name)
    entry = machine_entry(model)
    assert entry["capabilities"] == [c.value for c in model.capabilities]
    assert schema.read_machine(entry) == model


def test_more_and_fewer() -> None:
    model: Machine = machine(2, Capability.PACKETS)
    more = model.with_capabilities(Capability.CLAIMS, Capability.PACKETS)
    assert more.capabilities == (*model.capabilities, Capability.CLAIMS)
    assert more.without_capabilities(Capability.CLAIMS) == model


def test_a_single_thread_is_asked_for_where_a_body_depends_on_it() -> None:
    """All else has a question of its own: see the properties of Machine."""
    root = Path(ark.__file__).parent
    asking = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "Capability.SINGLE_THREAD" in path.read_text()
    }
    forms = {path for path in asking if path.split("/")[0] in ("tasks", "ops")}
    assert asking - forms == {
        "machine.py",  # which answers the questions
        "codegen/bodies.py",  # may warps of a block go on without meeting
        "lower/engines.py",  # one thread writes packets word by word
        "lower/rewrite/fuse_linear.py",  # how many rows a thread's sums hold
        "runtime/flows.py",  # as codegen/bodies.py
    }


@pytest.mark.parametrize("name", MODELS)
def test_lanes_and_a_single_thread_agree(name: str) -> None:
    model = registry.machine(name)
    assert model.coalesces != model.has(Capability.SINGLE_THREAD)
