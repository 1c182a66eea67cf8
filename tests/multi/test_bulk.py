"""The engine `bulk`: copies of large consecutive blocks to a peer. Its tasks use ordinary stores on
a CPU, the copy unit (TMA) on NVIDIA GPUs, and loads directly into LDS on AMD GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.collectives import build, devices, keep
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import slow

COUNTS, FEW = (1, 3, 4099, 70001), (3, 70001)
WORLD_SIZE = 2


def body(rank: int, counts: Sequence[int] = COUNTS) -> None:
    for count in counts:
        x = ark.mul(ark.tensor([count], name=f"x{count}"), 1.0)
        keep(ark.all_gather(x, rank, WORLD_SIZE, engine="bulk"), f"gather{count}")
        keep(ark.all_reduce(x, rank, WORLD_SIZE, engine="bulk"), f"sum{count}")
        shared = ark.comm.symmetric([count], name=f"shared{count}")
        channel = ark.comm.channel(1 - rank, tag=count, engine="bulk")
        channel.put(x, shared, signal=True)
        (there,) = channel.wait(shared)
        keep(there, f"put{count}")


def check(
    name: str,
    adapt: Callable[[Machine], Machine],
    arch: str = "gfx942",
    counts: Sequence[int] = COUNTS,
) -> None:
    with devices(name, WORLD_SIZE, arch) as (opened, machine):
        plans = build(WORLD_SIZE, lambda rank: body(rank, counts), adapt(machine))
        verify(plans)
        assert "bulk" in {op.kind for op in plans[0].ops}
        given = [
            {n: np.arange(n, dtype=np.float32) % 251 + rank for n in counts} for rank in range(2)
        ]

        def run(ranks: ThreadRanks) -> dict[str, np.ndarray]:
            device = opened[ranks.rank]
            with Executor(
                plans[ranks.rank], registry.get(name), device, ranks=ranks, budget_s=60.0
            ) as executor:
                own = {
                    b.name.rpartition(".")[0]: b
                    for b in executor.plan.buffers
                    if b.rank == ranks.rank
                }
                for n, values in given[ranks.rank].items():
                    address = executor.buffer_address(own[f"x{n}"].id)
                    device.write(address, values.view(np.uint8))
                executor.start(3).wait(60.0)
                return {
                    f"{operation}{n}": device.read(
                        executor.buffer_address(own[f"{operation}{n}"].id),
                        own[f"{operation}{n}"].nbytes,
                    ).view(np.float32)
                    for n in counts
                    for operation in ("gather", "sum", "put")
                }

        actual = run_ranks(WORLD_SIZE, run)
    for rank in range(WORLD_SIZE):
        for n in counts:
            inputs = [given[r][n] for r in range(WORLD_SIZE)]
            np.testing.assert_array_equal(actual[rank][f"gather{n}"], np.concatenate(inputs))
            np.testing.assert_array_equal(actual[rank][f"sum{n}"], inputs[0] + inputs[1])
            np.testing.assert_array_equal(actual[rank][f"put{n}"], inputs[1 - rank])


def test_bulk_tasks_on_cpu_ranks_give_the_right_result() -> None:
    def able(machine: Machine) -> Machine:
        return machine.with_capabilities(Capability.PEER_BULK)

    check("cpu", able)


def test_on_cuda() -> None:
    check("cuda", lambda machine: machine)


@pytest.mark.parametrize(
    "arch", ["gfx942", *(pytest.param(a, marks=slow) for a in ("gfx950", "gfx90a"))]
)
def test_on_emulated_amd_by_loads_to_lds(arch: str) -> None:
    """The engine `bulk` on emulated AMD devices, with all checks: LDS is not read before a load
    into it is complete, nor overwritten too early.
    """
    check("rocm", lambda machine: machine, arch, FEW)


@pytest.mark.parametrize("machine", ["cpu-2", "rx7900xtx", "a100"])
def test_bulk_is_refused_on_machines_without_it(machine: str) -> None:
    with pytest.raises(ark.UnsupportedError, match=r"'bulk'.*it has"):
        build(WORLD_SIZE, body, registry.machine(machine))
