"""The types of a prediction's inputs and results: ranks, work, costs of blocks, memory, and the
prediction itself.

Created by ark.parallel.plans.predict, drawn by ark.parallel.page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ark.machine import Machine
from ark.parallel.pipeline.schedule import Schedule
from ark.parallel.plans.blocks import ModelBlock
from ark.parallel.plans.choices import Option
from ark.parallel.plans.rules import PLANS
from ark.parallel.plans.search import Change

COPIES: dict[str, tuple[int, int, int]] = {
    "data": (0, 0, 0),
    "zero1": (0, 0, 1),
    "zero2": (0, 1, 1),
    "zero3": (1, 1, 1),
    "co-shard": (0, 0, 0),
}
"""How copies of the model (data parallelism) store parameters, gradients and optimizer state, by
plan name. For each of the three: 1 if every rank of the axis stores only a part, 0 if it stores
all.
"""


@dataclass(frozen=True)
class Target:
    """The ranks and their links. link_gbps: GB/s at which a rank sends within a host. network_gbps:
    GB/s at which it sends between hosts. host_ranks: the number of ranks on each host. Ranks are
    numbered row by row over the mesh.
    """

    machine: Machine
    link_gbps: float = 50.0
    network_gbps: float = 50.0
    host_ranks: int = 8


@dataclass(frozen=True)
class Work:
    """The work on the model. batch: the number of micro-batches of a step, on all ranks together.
    recompute: True to store only the inputs of each block and to compute its other results again
    for the gradients.
    """

    training: bool = False
    batch: int = 8
    recompute: bool = False


@dataclass(frozen=True)
class RankMemory:
    """The bytes that a rank stores, separately for parameters, gradients and other contents."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True)
class BlockCost:
    """The costs of a block of the model: microseconds per micro-batch, stored bytes, and
    communication.
    """

    block: ModelBlock
    forward_us: float
    backward_us: float
    parameter_bytes: int
    saved_bytes: int
    output_bytes: int
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a plan.

    us: microseconds of a step. bound_us: a lower bound for every order of the step's blocks.
    stage_of: for each block, its stage in the pipeline (-1: all ranks share it). memory: for each
    stage, the memory of its rank. schedule, tick_us: the timeline of the pipeline's ranks.
    synced_bytes, synced_us: bytes of the gradients that a rank sends, and the time for this.
    """

    mesh: tuple[int, ...]
    names: tuple[str, ...]
    work: Work
    us: float
    blocks: tuple[BlockCost, ...]
    options: Mapping[int, Option] = field(repr=False)
    stage_of: tuple[int, ...]
    rank_of: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    schedule: Schedule = field(repr=False)
    tick_us: float
    send_bytes: int
    send_us: float
    synced_bytes: int
    synced_us: float
    update_us: float
    optimal: bool

    @property
    def depth(self) -> int:
        """The number of ranks of the pipeline."""
        return len(self.memory)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which ops are split."""
        return tuple(i for i, name in enumerate(self.names) if name in PLANS and name not in COPIES)

    @property
    def peak(self) -> int:
        """Bytes of memory of the rank that needs the most."""
        return max(m.total for m in self.memory)
