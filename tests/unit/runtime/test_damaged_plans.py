"""Every way to run a plan checks it in the same way: a damaged plan is refused with a reason, or
computes what its ops define, and never ends the process. Damaged plans that are admitted run in a
process of their own.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import ark
from ark.backend import registry
from ark.cli.export.write import files
from ark.errors import BaseError, PlanError, SystemError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.plan.rotated import Rotated
from ark.plan.serialize import from_dict, from_json, to_dict, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.admission import admit, admit_rank, memory_shortage
from ark.runtime.api.plan import Plan as ArkPlan
from ark.runtime.runner import load
from tests.checkpoints import make_checkpoint
from tests.fuzz import mutate
from tests.fuzz.execute import compare
from tests.slow import SLOW

ROOT = Path(__file__).parents[3]
DAMAGES = {
    "two lanes": lambda data: data["machine"].update(lanes=2),
    "two warps": lambda data: data["machine"]["variants"][0]["roles"][0].update(warps=2),
    "4 GiB of packets": lambda data: data["arenas"].update(packet=1 << 32),
    "a large buffer": lambda data: _grow(data, 1 << 32),
    "a tile left out": lambda data: data["phases"][-1]["processors"][0].pop(),
}


def _grow(data: dict, nbytes: int) -> None:
    """Enlarges the plan's last activation buffer by some bytes, and its arena accordingly."""
    buffer = [b for b in data["buffers"] if b[1] == "activation"][-1]
    buffer[2] += nbytes
    data["arenas"]["activation"] = max(
        b[3] + (b[2] + 255) // 256 * 256 for b in data["buffers"] if b[1] == "activation"
    )


def small() -> Plan:
    """Returns an unverified plan of a product, a relu and a softmax for two processors of a CPU."""
    model = Model()
    with use_model(model):
        x, w = ark.tensor([6, 8]), ark.tensor([8, 12])
        ark.softmax(ark.relu(ark.matmul(x, w)))
    return make_plan(model.graph, registry.machine("cpu-2"))


def damaged(plan: Plan, damage: str) -> Plan:
    data = json.loads(to_json(plan))
    DAMAGES[damage](data)
    return from_dict(data)


@pytest.mark.parametrize("damage", DAMAGES)
def test_loading_refuses_a_damaged_plan(damage: str) -> None:
    backend = registry.get("cpu")
    device = backend.open(0)
    with pytest.raises(PlanError):
        load(damaged(small(), damage), backend, device)
    device.close()


@pytest.mark.parametrize("damage", DAMAGES)
def test_runtime_refuses_a_damaged_plan_also_with_a_model(damage: str) -> None:
    """A plan that is run together with a model is checked like one without a model."""
    model = Model()
    ark.init(backend="cpu")
    with use_model(model), ark.Runtime() as runtime, pytest.raises(PlanError):
        runtime.launch(plan=ArkPlan(to_dict(damaged(small(), damage)), model))
    ark.init()


@pytest.mark.parametrize("damage", DAMAGES)
def test_export_refuses_a_damaged_plan(damage: str) -> None:
    with pytest.raises(PlanError):
        files(damaged(small(), damage), registry.get("cpu"), "native", "small")


@pytest.mark.parametrize("damage", ["two lanes", "two warps", "4 GiB of packets"])
def test_generator_refuses_a_damaged_plan(tmp_path: Path, damage: str) -> None:
    make_checkpoint(tmp_path)
    checkpoint, backend = Checkpoint.open(tmp_path), registry.get("cpu")
    device = backend.open(0)
    machine = registry.machine("cpu-2")
    with Generator(checkpoint, backend, device, context=32, machine=machine) as generator:
        opened = generator.executor.plan
    with pytest.raises(PlanError):
        Generator(checkpoint, backend, device, plan=damaged(opened, damage))
    with Generator(checkpoint, backend, device, plan=from_json(to_json(opened))) as generator:
        assert len(list(generator.stream([1, 2], 2))) == 2
    device.close()


def test_changed_copy_of_a_verified_plan_is_not_verified() -> None:
    plan = small()
    verify([plan])
    assert plan.verified and not dataclasses.replace(plan, rank=0).verified
    assert not from_json(to_json(plan)).verified
    assert Rotated(plan)[0].verified


def test_plan_beyond_free_memory_lists_its_arenas() -> None:
    model = Model()
    with use_model(model):
        ark.relu(ark.matmul(ark.parameter([1 << 10, 1 << 18]), ark.tensor([1 << 18, 4])))
    plan = make_plan(model.graph, registry.machine("cpu-1"))
    backend = registry.get("cpu")

    class Small(type(backend.open(0))):  # type: ignore[misc]
        def free_bytes(self) -> int:
            return 1 << 29

    with pytest.raises(
        SystemError, match=r"needs 1\.\d\d GB .*weights 1\.07 GB.* has free only 536\.87 MB"
    ):
        load(plan, backend, Small(0))
    assert not memory_shortage(plan, 0, "it has") and not memory_shortage(plan, 2 << 30, "it has")


def test_machine_without_a_model_of_its_name_keeps_to_its_architecture() -> None:
    data = to_dict(small())
    data["machine"]["name"] = "a-box"
    admit([from_dict(data)])
    data["machine"]["lanes"] = 2
    with pytest.raises(PlanError, match="lanes 2"):
        admit([from_dict(data)])


def test_every_damaged_field_is_refused_or_harmless() -> None:
    """Every field of a plan's JSON is replaced by values near the original one and far from it. The
    plan is refused, or gives the result of its ops.
    """
    command = [sys.executable, "-m", "tests.unit.runtime.test_damaged_plans", "40" if SLOW else "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["refused"] > 100 and counts["equal"] + counts["alike"] > 3


def damage_fields(rounds: int) -> dict[str, int]:
    """Damages each field of a plan several times. Asserts that admitted plans equal their serial
    oracle. Returns the number of plans by outcome.
    """
    backend = registry.get("cpu")
    device = backend.open(0)
    data = json.loads(to_json(small()))
    places = [p for p in mutate.places(data) if not isinstance(mutate._at(data, p), (list, dict))]
    counts = {"refused": 0, "equal": 0, "alike": 0}
    for number in range(rounds):
        for place in places:
            rng = random.Random(f"{number} {place}")
            changed = json.loads(json.dumps(data))
            holder = mutate._at(changed, place[:-1])
            old = holder[place[-1]]
            holder[place[-1]] = rng.choice([mutate._near(old, rng), rng.choice(mutate.ODD)])
            try:
                plan = from_json(json.dumps(changed))
                admit_rank(plan, device)
            except BaseError as error:
                assert len(str(error)) < 1000 and "\n" not in str(error), (place, str(error))
                counts["refused"] += 1
                continue
            outcome = compare(plan)
            assert not outcome.wrong, (place, holder[place[-1]], outcome.wrong)
            counts["equal" if outcome.ran else "alike"] += 1
    return counts


if __name__ == "__main__":
    print(json.dumps(damage_fields(int(sys.argv[1]))))
