"""Small plans for tests of planner and verifier: a decoder on several machines."""

from __future__ import annotations

import dataclasses
from functools import cache

from ark.ir.dtype import by_name
from ark.ir.graph import Graph
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.costs import ESTIMATED, Costs
from ark.machine.variant import block
from ark.models.build import Shape, build
from ark.models.config import LlamaConfig, Rope
from ark.models.plans import make_plans
from ark.plan.types import Plan

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=640,
    max_position_embeddings=128,
    rope=Rope(theta=10000.0),
    tie_word_embeddings=True,
)


OF_THREADS = (
    Capability.SINGLE_THREAD,
    Capability.ONE_PRODUCT_BODY,
    Capability.STARTS_PROCESSORS,
    Capability.HOST_MEMORY,
)
COOPERATIVE_COSTS = Costs(packet_bytes=512 << 10, stream_rows=8, hand_over_work=32768.0)


def machine(processors: int, *capabilities: Capability, warps: int = 1) -> Machine:
    """Returns a machine model for tests. warps > 1 gives it cooperative threads, as a GPU has."""
    cooperative = warps > 1
    return Machine(
        name="test",
        arch="test",
        backend="test",
        processors=processors,
        lanes=32 if cooperative else 1,
        shared_bytes=1 << 20,
        variants=(block(warps),),
        capabilities=(*capabilities, *(() if cooperative else OF_THREADS)),
        costs=COOPERATIVE_COSTS if cooperative else ESTIMATED,
    )


def decoder_plans(target: Machine, chunk: int = 4, ranks: int = 1, **options: object) -> list[Plan]:
    """Returns verified plans of the small decoder, cached for the process."""
    return list(_plans(target, chunk, ranks, *sorted(options.items())))


@cache
def _plans(target: Machine, chunk: int, ranks: int, *options: tuple[str, object]) -> list[Plan]:
    return new_plans(target, chunk, ranks, **dict(options))


def new_plans(target: Machine, chunk: int = 4, ranks: int = 1, **options: object) -> list[Plan]:
    """Returns the same plans, planned anew."""
    shape = Shape(CONFIG, by_name("fp32"), 64, chunk, 0, ranks)
    return list(make_plans(shape, target, dict(options)))


def decoder_graphs(ranks: int, tied: bool = False, chunk: int = 4) -> list[Graph]:
    """Returns the small decoder's graphs by rank. tied: the embedding is also the output head."""
    heads = CONFIG.num_key_value_heads * (2 if ranks > 2 else 1)
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, num_key_value_heads=heads)
    shapes = [Shape(config, by_name("fp32"), 64, chunk, rank, ranks) for rank in range(ranks)]
    return [build(shape).graph for shape in shapes]


def replace_task(plan: Plan, place: tuple[int, int, int], **changes: object) -> Plan:
    """Returns the plan with the task at (phase, processor, position) changed."""
    number, processor, position = place
    phase = plan.phases[number]
    tasks = list(phase.processors[processor])
    tasks[position] = dataclasses.replace(tasks[position], **changes)  # type: ignore[arg-type]
    return with_tasks(plan, number, processor, tasks)


def with_tasks(plan: Plan, number: int, processor: int, tasks: list) -> Plan:
    """Returns the plan with another task list for one processor."""
    phase = plan.phases[number]
    lists = list(phase.processors)
    lists[processor] = tuple(tasks)
    phases = list(plan.phases)
    phases[number] = dataclasses.replace(phase, processors=tuple(lists))
    return dataclasses.replace(plan, phases=tuple(phases))
