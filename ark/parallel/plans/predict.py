"""Predicts a plan over a whole mesh: its time, the memory of every rank, the communication and the
timeline.

A plan combines a pipeline, copies of the model on different data, and splits of its ops. Nothing is
run. The graph computes one micro-batch. Along an axis with a pipeline's name, each rank has some of
the blocks; along an axis with a name of `COPIES`, each rank works on other micro-batches; along the
other axes ops are split (ark.parallel.plans.rules). Costs are those of ark.parallel.plans.choices.
Sends are added to the time of the block that sends, gradients are summed after the last backward
pass, and communication is assumed not to overlap with computation. Called by `ark parallelize` and
ark.parallel.plans.auto.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ark.errors import InvalidUsageError, PlanError
from ark.parallel.layout.moves import ring_volume
from ark.parallel.pipeline.named import (
    PIPELINES,
    STAGES_PER_DEVICE,
    replay,
)
from ark.parallel.pipeline.placement import Placement
from ark.parallel.pipeline.schedule import Schedule
from ark.parallel.plans.choices import Costs
from ark.parallel.plans.prediction import COPIES, BlockCost, Prediction, RankMemory, Target, Work
from ark.parallel.plans.rules import PLANS
from ark.parallel.plans.search import Memory
from ark.parallel.plans.splits import Splits
from ark.parallel.plans.times import rates_of

# With the plan named `co-shard` a rank divides its part of each layer into this many pieces, which
# it computes one after the other to save memory.
CO_SHARD_PARTS = 2
IDLE_SHARE_OF_DEPTH = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 0.5, "zero-bubble": 0.25}
"""The idle time of a pipeline that cannot be avoided, by the pipeline's name. It is given per stage
after the first, as a fraction of the time of a micro-batch on one stage.
"""
# A lower bound for the activations that a stage stores: this fraction of an equal share of all
# stored activations.
MIN_STAGE_MEMORY_SHARE = 0.8
# The resolution of a predicted schedule: the number of ticks that the longest block takes.
TICKS_PER_BLOCK = 50_000
NAMES = tuple(dict.fromkeys((*PLANS, *COPIES, *PIPELINES)))


def link_rates(mesh: Sequence[int], target: Target) -> list[float]:
    """Bytes per microsecond along each axis. An axis gets the rate of the network if a group of its
    ranks spans several hosts.
    """
    rates = []
    for axis, count in enumerate(mesh):
        span = math.prod(mesh[axis + 1 :]) * count
        inside = span <= target.host_ranks
        rates.append((target.link_gbps if inside else target.network_gbps) * 1e3)
    return rates


def state_factors(work: Work, itemsize: int, copies: str, ranks: int) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and optimizer state that a rank stores for each byte of a
    parameter.

    In training, gradients have the parameters' type. Adam stores two fp32 moments and, for
    parameters of a smaller type, an fp32 copy.
    """
    if not work.training:
        return 1.0, 0.0, 0.0
    optimizer = (8 if itemsize >= 4 else 12) / itemsize
    parts = [ranks if cut else 1 for cut in COPIES[copies]]
    return 1.0 / parts[0], 1.0 / parts[1], optimizer / parts[2]


def predict(
    splits: Splits,
    mesh: Sequence[int],
    names: Sequence[str],
    target: Target,
    work: Work,
    memory_bytes: int | None = None,
    refit: bool = True,
) -> Prediction:
    """The prediction of the plan with these names, one name per axis of the mesh.

    refit: True to search for other splits if the fastest ones of "auto" do not fit into memory.

    Raises InvalidUsageError if names or numbers contradict each other, and PlanError if a rank
    needs more than memory_bytes.
    """
    mesh, names = tuple(mesh), tuple(names)
    shape = _Shape(splits, mesh, names, target, work)
    prediction = shape.attempt(None)
    if memory_bytes is None or prediction.peak <= memory_bytes:
        return prediction
    if refit and "auto" in shape.rules:
        prediction = shape.attempt(shape.memory(memory_bytes))
        if prediction.peak <= memory_bytes:
            return prediction
    raise PlanError(
        f"the plan {','.join(names)} over {'x'.join(map(str, mesh))} needs "
        f"{prediction.peak / 1e9:.1f} GB per rank, but a rank has {memory_bytes / 1e9:.1f}; use "
        "more ranks, give more memory, or another plan (zero3, more stages, recomputation)"
    )


def bounds(
    splits: Splits, mesh: Sequence[int], names: Sequence[str], target: Target, work: Work
) -> tuple[float, float]:
    """Lower bounds of a plan: microseconds of a step, and bytes of a rank. Raises InvalidUsageError
    as `predict` does.

    The time is the time of a step's blocks, divided equally among ranks, plus the idle time that
    the pipeline cannot avoid. The memory is the state of the parameters plus most of the saved
    results of the first stage.
    """
    shape = _Shape(splits, tuple(mesh), tuple(names), target, work)
    _, blocks, _ = splits.find(shape.costs, shape.rules, work)
    whole = sum(b.forward_us + b.backward_us for b in blocks) / shape.depth
    chunks = 2 if shape.pipeline == "chimera" else 1
    idle = IDLE_SHARE_OF_DEPTH.get(shape.pipeline, 0.0) * (shape.depth - 1)
    own = sum(b.parameter_bytes for b in blocks) * chunks / shape.depth
    held = own * sum(shape.factors)
    if work.training:
        kept = sum(b.output_bytes if shape.work.recompute else b.saved_bytes for b in blocks)
        held += MIN_STAGE_MEMORY_SHARE * min(shape.count, shape.depth) * kept / shape.depth
    return (shape.count * chunks + idle) * whole, held


class _Shape:
    """The structure of a plan: the purpose of each axis of the mesh (pipeline, copies or splits),
    and the numbers of copies, stages and micro-batches.
    """

    def __init__(
        self,
        splits: Splits,
        mesh: tuple[int, ...],
        names: tuple[str, ...],
        target: Target,
        work: Work,
    ) -> None:
        _check(mesh, names, work)
        rates = link_rates(mesh, target)
        pipe = next((i for i, name in enumerate(names) if name in PIPELINES), None)
        copy = next((i for i, name in enumerate(names) if name in COPIES), None)
        inner = [i for i, name in enumerate(names) if name in PLANS and name not in COPIES]
        self.splits, self.mesh, self.names = splits, mesh, names
        self.depth = mesh[pipe] if pipe is not None else 1
        self.copies = mesh[copy] if copy is not None else 1
        self.pipeline = names[pipe] if pipe is not None and self.depth > 1 else "1f1b"
        self.copied = names[copy] if copy is not None else "data"
        recompute = work.training and (work.recompute or self.copied == "co-shard")
        self.work = Work(work.training, work.batch, recompute)
        self.stages = self.depth * (STAGES_PER_DEVICE if self.pipeline == "interleaved" else 1)
        shared = self.copies * (2 if self.pipeline == "chimera" else 1)
        self.count = work.batch // shared
        if work.batch % shared:
            pairs = ", two pipelines each" if self.pipeline == "chimera" else ""
            raise InvalidUsageError(
                f"{work.batch} micro-batches are not divisible by {self.copies} copies of the "
                f"model{pairs}; use a multiple of {shared}"
            )
        machine = target.machine
        self.own = rates_of(machine, target.link_gbps)
        links = [rates[i] for i in inner] or [1.0]
        counts = [mesh[i] for i in inner] or [1]
        self.costs = Costs(counts, self.own, links, work.training, splits.nodes)
        self.rules = [names[i] for i in inner] or ["replicated"]
        self.factors = state_factors(work, splits.itemsize, self.copied, self.copies)
        self.pipe_rate = rates[pipe] if pipe is not None else 1.0
        self.copy_rate = rates[copy] if copy is not None else 1.0

    def memory(self, limit: int) -> Memory:
        """The memory that is available for the parameters and results of the stage that needs the
        most.
        """
        twice = 2 if self.pipeline == "chimera" else 1
        flying = min(self.count, self.depth) if self.work.training else 0
        kept = 0 if self.work.recompute else flying * twice / self.depth
        return Memory(limit, sum(self.factors) * twice / self.depth, kept)

    def attempt(self, memory: Memory | None) -> Prediction:
        """The prediction with the fastest splits that fit into `memory`."""
        work, own = self.work, self.own
        chosen, blocks, optimal = self.splits.find(self.costs, self.rules, work, memory)
        shared = [self.pipeline == "interlaced" and not b.block.numbered for b in blocks]
        loads = [b.forward_us + b.backward_us for b in blocks]
        stage_of = self.splits.stages(tuple(loads), self.stages, tuple(shared))
        pairs = zip(blocks, stage_of, stage_of[1:], strict=False)
        send_bytes = max((b.output_bytes for b, s, t in pairs if s != t), default=0)
        send_us = own.step_us + send_bytes / self.pipe_rate if self.depth > 1 else 0.0
        forward, backward, shared_us = self._stage_times(blocks, stage_of, send_us)
        tick = max(*forward, *backward, shared_us) / TICKS_PER_BLOCK or 1.0
        order = self.splits.order(self.pipeline, self.depth, self.count, not work.training)
        placement = _timed(order[0].placement, forward, backward, shared_us, tick)
        schedule = replay(order[1], placement, self.count)
        kept = self._memory(blocks, stage_of, schedule)
        sent = synced = update = 0.0
        if work.training:
            grads = max(m.parameters for m in kept) / self.factors[0]
            if self.copies > 1:
                sent = ring_volume("all_reduce", self.copies, 1) * grads / self.copies
                synced = own.step_us + sent / self.copy_rate
            state = max(m.parameters + m.gradients + m.optimizer for m in kept)
            update = 2 * state / own.memory_bytes_per_us
        return Prediction(
            self.mesh,
            self.names,
            work,
            schedule.makespan * tick + synced + update,
            tuple(blocks),
            chosen,
            tuple(stage_of),
            tuple(stage % self.depth for stage in range(self.stages)),
            kept,
            schedule,
            tick,
            send_bytes,
            send_us,
            round(sent),
            synced,
            update,
            optimal,
        )

    def _stage_times(
        self, blocks: Sequence[BlockCost], stage_of: Sequence[int], send_us: float
    ) -> tuple[list[float], list[float], float]:
        """Returns the forward and the backward time of each stage, and the time of the blocks that
        all ranks share.
        """
        start = send_us + self._gather_us(blocks) / self.stages
        forward, backward, shared = [start] * self.stages, [start] * self.stages, 0.0
        for block, stage in zip(blocks, stage_of, strict=True):
            if stage < 0:
                block_us = block.forward_us + block.backward_us
                shared += block_us / self.depth / (1 + self.work.training)
                continue
            forward[stage] += block.forward_us
            backward[stage] += block.backward_us
        return forward, backward, shared

    def _gather_us(self, blocks: Sequence[BlockCost]) -> float:
        """The time in which the ranks gather parameters with ZeRO 3. Parameters are gathered for
        each use.
        """
        if self.copied != "zero3" or self.copies == 1:
            return 0.0
        whole = sum(b.parameter_bytes for b in blocks)
        sent = ring_volume("all_gather", self.copies, 1) * whole / self.copies
        return len(blocks) * self.own.step_us + sent / self.copy_rate

    def _memory(
        self, blocks: Sequence[BlockCost], stage_of: Sequence[int], schedule: Schedule
    ) -> tuple[RankMemory, ...]:
        """The memory of each rank of the pipeline, at the moment at which the schedule needs the
        most.
        """
        work = self.work
        held, saved = [0.0] * self.stages, [0.0] * self.stages
        widest, shared = [0.0] * self.depth, 0.0
        for block, stage in zip(blocks, stage_of, strict=True):
            if stage < 0:
                shared += block.parameter_bytes / self.depth
                continue
            held[stage] += block.parameter_bytes
            saved[stage] += block.output_bytes if work.recompute else block.saved_bytes
            whole = block.saved_bytes / (CO_SHARD_PARTS if self.copied == "co-shard" else 1)
            widest[stage % self.depth] = max(widest[stage % self.depth], whole)
        ends = "w" if self.pipeline == "zero-bubble" else "b"
        memory = []
        for rank in range(self.depth):
            parameters = shared + sum(held[rank :: self.depth])
            if self.pipeline == "chimera":
                parameters += held[self.depth - 1 - rank]
            now = peak = 0.0
            for entry in schedule.entries:
                if work.training and rank in entry.devices and entry.block[1:] != "in":
                    stage = _stage(entry.block, self.depth)
                    now += saved[stage] * ((entry.block[0] == "f") - (entry.block[0] == ends))
                    peak = max(peak, now)
            if work.recompute or not work.training:
                peak += widest[rank]
            state = [round(parameters * f) for f in self.factors]
            memory.append(RankMemory(state[0], state[1], state[2], round(peak)))
        return tuple(memory)


def _stage(block: str, depth: int) -> int:
    """The stage of a pipeline's block. In Chimera's second direction, stages are counted from the
    other end.
    """
    number, _, way = block[1:].partition(".")
    return depth - 1 - int(number) if way == "up" else int(number)


def _check(mesh: tuple[int, ...], names: tuple[str, ...], work: Work) -> None:
    unknown = [name for name in names if name not in NAMES]
    if unknown or len(names) != len(mesh):
        raise InvalidUsageError(
            f"the plan {','.join(names)} does not fit a mesh of {len(mesh)} axes; give one of "
            f"{', '.join(NAMES)} for each"
        )
    for kind, plural in ((PIPELINES, "pipelines"), (COPIES, "kinds of copies")):
        if sum(name in kind for name in names) > 1:
            raise InvalidUsageError(
                f"the plan {','.join(names)} has two {plural}; at most one axis may have one"
            )
    if not 1 <= work.batch <= 1 << 16:
        raise InvalidUsageError(
            f"batch={work.batch} is out of range; give 1 to {1 << 16} micro-batches"
        )
    if not work.training and any(name in ("zero1", "zero2", "co-shard", "3f1b") for name in names):
        raise InvalidUsageError(f"the plan {','.join(names)} is for training; omit --inference")


def _timed(
    placement: Placement,
    forward: Sequence[float],
    backward: Sequence[float],
    shared: float,
    tick: float,
) -> Placement:
    """The placement with the times of each stage, in ticks. tick: microseconds of a tick."""
    halves = any(b.name[0] == "w" for b in placement.blocks)
    blocks = []
    for block in placement.blocks:
        back = block.name[0] in "bw"
        if block.name[1:] == "in":
            us = shared
        else:
            us = (backward if back else forward)[_stage(block.name, placement.devices)]
            us = us / 2 if back and halves else us
        blocks.append(msgspec.structs.replace(block, span=max(1, round(us / tick))))
    return msgspec.structs.replace(placement, blocks=tuple(blocks))
