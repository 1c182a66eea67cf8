"""No algorithm is faster than the computed bound of a collective, on random networks. Some have
weak links, some have switches that multicast and reduce.

12 networks by default, 5,000 with `nox -s slow`.
"""

import dataclasses
import random
from fractions import Fraction

import pytest

from ark.collective.bounds import least_us
from ark.collective.programs import Collective
from ark.collective.simulate import simulate
from ark.collective.synthesis import algorithms, synthesize
from tests.slow import SLOW
from tests.unit.collective.networks import random_eulerian

BLOCKS, PER_BLOCK = (100, 50) if SLOW else (6, 2)
RESULT_BYTES = 1 << 24


def network(seed):
    """Returns a random network without latency. Every third has weak links, every fourth has
    switches that multicast and reduce.
    """
    topology = random_eulerian(seed)
    rng = random.Random(seed)
    weak = Fraction(1, rng.randint(1, 4)) if seed % 3 == 0 else Fraction(1)
    links = tuple(
        dataclasses.replace(
            link, latency_us=0.0, bandwidth=link.bandwidth * rng.choice([1, 1, 1, weak])
        )
        for link in topology.links
    )
    able = topology.switches if seed % 4 == 0 else ()
    sums = able if seed % 8 == 0 else ()
    return dataclasses.replace(topology, links=links, multicast=able, reduces=sums)


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_algorithm_beats_the_bound(block):
    for seed in range(block * PER_BLOCK, (block + 1) * PER_BLOCK):
        topology = network(seed)
        if len(topology.ranks) < 2:
            continue
        collective = list(Collective)[seed % len(Collective)]
        root = seed % len(topology.ranks) if collective.rooted else None
        bound = least_us(topology, collective, RESULT_BYTES, root)
        for name in algorithms(topology, collective.value):
            if name == "taccl" and seed % 25:
                continue  # its search takes seconds; few seeds suffice
            pieces = random.Random(seed).choice([1, 4, 32])
            program = synthesize(
                topology, collective.value, name, root=root, pieces=pieces, time_limit_s=2
            )
            time = simulate(program, topology, RESULT_BYTES).time_us
            assert time >= bound * (1 - 1e-9), (seed, collective, name, time / bound)
