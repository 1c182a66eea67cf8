"""The engine `switch`, in which the NVLink switch adds the ranks' data. Its plans are made and
verified. CPU ranks compute the sums by ordinary loads. NVIDIA's instructions for the switch are
compiled for sm_90a but not run. The planner uses this engine only where the user names it.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.errors import UnsupportedError
from ark.ir.dtype import DataType, bf16, by_name, fp16, fp32
from ark.lower.engines import ENGINES, MESSAGES, SWITCH, TRANSFERS, choose_engine
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.serialize import machine_of
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests import kept
from tests.cases.collectives import build, devices
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import few

COUNTS = (1, 3, 4, 4099, 70001)


def able(machine: Machine) -> Machine:
    return machine.with_capabilities(Capability.PEER_MULTICAST)


def sums(rank: int, world: int, dtype: DataType = fp32, engine: str = SWITCH) -> None:
    for count in COUNTS:
        x = ark.tensor([count], dtype, name=f"x{count}")
        total = ark.all_reduce(x, rank, world, engine=engine)
        ark.copy(total, output=ark.tensor([count], dtype, name=f"sum{count}"))


@pytest.mark.parametrize("world", few(1, [3, 2, 4]))
def test_sums_are_right_where_the_common_body_adds(world: int) -> None:
    with devices("cpu", world) as (opened, machine):
        plans = build(world, lambda rank: sums(rank, world), able(machine))
        verify(plans)
        assert "switch" in {op.kind for op in plans[0].ops}
        xs = [{n: np.arange(n, dtype=np.float32) % 251 + r for n in COUNTS} for r in range(world)]

        def work(ranks: ThreadRanks) -> list[np.ndarray]:
            plan, device = plans[ranks.rank], opened[ranks.rank]
            with Executor(plan, registry.get("cpu"), device, ranks=ranks) as executor:
                for n, values in xs[ranks.rank].items():
                    executor.write(f"x{n}", values)
                executor.start(3).wait(60.0)
                actual = [executor.read(f"sum{n}") for n in COUNTS]
                ranks.barrier()
                return actual

        for actual in run_ranks(world, work):
            for n, got in zip(COUNTS, actual, strict=True):
                np.testing.assert_array_equal(got, sum(x[n] for x in xs))


@pytest.mark.parametrize("dtype", few(1, [bf16, fp32, fp16]), ids=lambda d: d.name)
def test_its_instructions_compile_for_sm_90a(dtype: DataType) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    backend = registry.get("cuda")
    machine = able(registry.machine("h100"))
    plans = build(2, lambda rank: sums(rank, 2, dtype), machine)
    verify(plans)
    result = machine_of(plans[0])
    source = write(plans[0], result, backend.dialect("sm_90a")).source
    assert "multimem.ld_reduce" in source.text and "multimem.st" in source.text
    assert kept.binary(backend, source, Target("sm_90a", result.threads)).data


@pytest.mark.parametrize("name", ["cpu-2", "h100", "h200", "b200", "mi300x"])
def test_no_machine_offers_the_switch_engine(name: str) -> None:
    machine = registry.machine(name)
    assert not ENGINES[SWITCH].on(machine)
    with pytest.raises(UnsupportedError, match="'switch'"):
        build(2, lambda rank: sums(rank, 2), machine)
    for nbytes in (1, 1 << 20, 1 << 30):
        for among in (MESSAGES, TRANSFERS, tuple(ENGINES)):
            assert choose_engine(able(machine), nbytes, among=among).name != SWITCH
    plan = build(2, lambda rank: sums(rank, 2, engine="auto"), able(machine))[0]
    assert "switch" not in {op.kind for op in plan.ops}


def test_types_that_no_switch_adds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="a switch adds tensors of fp32, bf16, fp16"):
        build(2, lambda rank: sums(rank, 2, by_name("int32")), able(registry.machine("cpu-2")))
