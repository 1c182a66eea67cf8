"""Cases and helpers of test_msccl.py, which other tests use too."""

from __future__ import annotations

from ark.collective import topology
from ark.collective.programs import Collective
from ark.collective.synthesis import algorithms

ROUNDS = [
    (world, collective.value, algorithm)
    for world in (2, 3, 4)
    for collective in Collective
    for algorithm in algorithms(topology.full_mesh(world), collective.value)
    if algorithm not in ("taccl", "flow")
]
