"""Changes of a tensor's layout on ranks, chosen by simulated times: which steps are the fastest
depends on the network.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from ark.cli import main
from ark.collective.simulate import simulate
from ark.collective.synthesis import synthesize
from ark.collective.topology import load
from ark.errors import InvalidUsageError
from ark.parallel import Layout
from ark.parallel.layout.simulated import StepTimes, change_on
from tests.unit.parallel import layouts_in_numpy

SUMS, WHOLE = Layout.parse("R1V8D1,1"), Layout.parse("R8V1D1,1")
SHAPE = (64, 64)


def test_on_a_ring_it_is_the_ring() -> None:
    """On a ring of ranks, partial sums become replicas by one all-reduce, in the time of the ring
    algorithm.
    """
    steps, times = change_on(load("ring8"), SHAPE, SUMS, WHOLE, 4)
    assert [s.op for s in steps] == ["all_reduce"]
    ring = synthesize("ring8", "all_reduce", "ring")
    assert times[0] == pytest.approx(simulate(ring, load("ring8"), 64 * 64 * 4).time_us)


def test_behind_one_switch_halving_and_doubling_is_used() -> None:
    """Behind one switch, recursive halving and doubling send as much as the ring with fewer
    latencies.
    """
    network = load("h100")
    steps, times = change_on(network, (8, 8), SUMS, WHOLE, 4)
    ring = StepTimes(network).us("all_reduce", (tuple(range(8)),), 8 * 8 * 4)
    assert len(steps) > 1 and sum(times) < ring
    assert sum(s.elements for s in steps) == 2 * 7 * 64 / 8


@pytest.mark.parametrize("after", ["R8V1D1,1", "R2V1D2,2", "R1V1D1,8"])
def test_steps_give_the_sum(after: str) -> None:
    target = Layout.parse(after)
    steps, _ = change_on(load("dgx1v"), SHAPE, SUMS, target, 4)
    random = np.random.default_rng(3)
    parts = [random.integers(-9, 9, SHAPE) for _ in range(8)]
    held, _ = layouts_in_numpy.run(layouts_in_numpy.scatter(parts, SUMS), steps)
    for replica in layouts_in_numpy.gather(
        held, target, layouts_in_numpy.places(SUMS, steps), SHAPE
    ):
        np.testing.assert_array_equal(replica, sum(parts))


def test_other_numbers_of_ranks_are_refused() -> None:
    with pytest.raises(InvalidUsageError, match="ring4 has 4 ranks"):
        change_on(load("ring4"), SHAPE, SUMS, WHOLE, 4)


def test_command_says_times(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--shape", "64x64", "--from", "R1V4D1,1", "--to", "R4V1D1,1"]
    assert main([*words, "--topology", "ring4", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["us"] == sum(step["us"] for step in output["steps"]) > 0
    assert main([*words, "--topology", "ring4"]) == 0
    assert "(simulated)" in capsys.readouterr().out
