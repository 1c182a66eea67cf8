"""Growing fetches: copies to shared memory of all rows of a cache up to the current position, one
row more in each iteration. Tests their representation in plans, and faults that the verifier
refuses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.errors import PlanError
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp32
from ark.ir.graph import Graph
from ark.lower.ops import attention as attention_lowering
from ark.lower.pipeline import plan as plan_graph
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.llama import Llama
from ark.models.plans import make_plans
from ark.ops.tokens import TokenState
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Growth, Plan
from ark.plan.verify import verify
from ark.runtime import tables
from tests.unit.plan.growths import ROOM_POSITIONS, WIDE, growing, offers_roles
from tests.unit.plan.shapes import machine, replace_task


def decoder(target: Machine, chunk: int = 0, dtype: ark.DataType = bf16, **options: object) -> Plan:
    (decoder_plan,) = make_plans(Shape(WIDE, dtype, ROOM_POSITIONS, chunk), target, dict(options))
    return decoder_plan


@pytest.mark.parametrize("chunk", [0, 4])
def test_decoder_streams_its_caches_and_the_file_says_so(chunk: int) -> None:
    for target in (offers_roles(), machine(4, Capability.PACKETS)):
        planned = decoder(target, chunk)
        tasks = growing(planned)
        splits = {planned.ops[t.op].params["splits"] for _, t in tasks}
        assert len(splits) == 1 and len(tasks) == 2 * 2 * splits.pop()  # layers and heads
        for (phase, _, _), task in tasks:
            assert phase == len(planned.phases) - 1  # a prompt writes its rows itself
            (fetch,) = task.fetches
            assert (fetch.nbytes, fetch.growth.row, fetch.stage % 64) == (
                ROOM_POSITIONS * 64,
                64,
                0,
            )
            assert task.streamed == 0
        reread = from_json(to_json(planned))
        assert reread == planned
        verify([reread])


@pytest.mark.parametrize("dtype", [fp32, bf16])
def test_block_variant_and_fp32_read_caches_in_place(dtype: ark.DataType) -> None:
    """Attention reads its caches in place if they are not streamed: in the `block` variant, and in
    fp32, for which matrix units cannot be used.
    """
    options = {"variant": "block"} if dtype is bf16 else {}
    assert not growing(decoder(offers_roles(), dtype=dtype, **options))


def test_part_has_a_stage_at_least() -> None:
    """A part of attention has at least the positions of one stage, here 64 of a head of width 64,
    although more processors are available.
    """
    config = dataclasses.replace(WIDE, head_dim=64)
    target = registry.machine("h100")
    (planned,) = make_plans(Shape(config, bf16, 640, 0), target, {"variant": "roles"})
    assert {op.params["splits"] for op in planned.ops if op.kind == "attention"} == {10}


@pytest.mark.parametrize(
    ("batch", "room", "parts"),
    [(2, 576, 4), (2, 2048, 8), (3, 576, 4), (4, 576, 4), (8, 576, 1), (8, 640, 1), (8, 704, 2)],
)
def test_several_sequences_have_fewer_parts(batch: int, room: int, parts: int) -> None:
    """With several sequences attention is divided into fewer parts, each of at least two stages;
    into one if all positions of a head fit into a ring of ten slots.
    """
    config = dataclasses.replace(builtin_config("llama-3.2-1b"), num_hidden_layers=1)
    (planned,) = make_plans(Shape(config, bf16, room, 0, batch=batch), registry.machine("h100"))
    assert planned.variant == "roles"
    assert {op.params["splits"] for op in planned.ops if op.kind == "attention"} == {parts}
    assert parts > 1 or not any(op.kind == "attention_merge" for op in planned.ops)


def test_head_has_no_more_parts_than_can_be_merged() -> None:
    """A head is divided into at most as many parts as the merging task can hold. Here there are
    many processors for few heads, and shared memory beside the ring has room for 24 parts of 34
    floats.
    """
    target = dataclasses.replace(offers_roles().with_processors(64), shared_bytes=6 * 4096 + 3264)
    (planned,) = make_plans(Shape(WIDE, bf16, 2048, 0), target, {"variant": "roles"})
    assert {op.params["splits"] for op in planned.ops if op.kind == "attention"} == {24}
    more = dataclasses.replace(target, shared_bytes=1 << 20)
    (planned,) = make_plans(Shape(WIDE, bf16, 2048, 0), more, {"variant": "roles"})
    assert {op.params["splits"] for op in planned.ops if op.kind == "attention"} == {32}


CHANGES: dict[str, Callable[[Growth], Growth]] = {
    "length": lambda g: dataclasses.replace(g, length=0),
    "row": lambda g: dataclasses.replace(g, row=g.row // 2),
    "part": lambda g: dataclasses.replace(g, part=g.part + 1),
    "parts": lambda g: dataclasses.replace(g, parts=g.parts + 1),
    "beside": lambda g: dataclasses.replace(g, beside=g.beside + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_growth_is_refused(change: str) -> None:
    decoder_plan = decoder(offers_roles())
    place, task = growing(decoder_plan)[0]
    (fetch,) = task.fetches
    other = dataclasses.replace(fetch, growth=CHANGES[change](fetch.growth))
    with pytest.raises(PlanError, match="differ from those that tasks of kind"):
        verify([replace_task(decoder_plan, place, fetches=(other,))])


def _graph(before: Callable[[Llama, TokenState], None]) -> Graph:
    """Returns a decoder's graph. Each iteration first runs `before`, which may change the caches or
    the position.
    """
    model = Model(0, 1)
    with use_model(model):
        llama = Llama(WIDE, bf16)
        llama.name_tensors()
        llama.setup(ROOM_POSITIONS)
        llama.name_tensors()
        state = TokenState.make(ROOM_POSITIONS)
        with model.graph.entry("decode"):
            before(llama, state)
            llama.decode(state)
    return model.graph


def _advance(_: Llama, state: TokenState) -> None:
    ark.advance(state, 1)


def _rewrite(llama: Llama, _: TokenState) -> None:
    keys = llama.layers[0].attention.keys
    ark.mul(keys, 0.5, output=keys)


FIRST = {
    "which an earlier op of the iteration writes": _advance,
    "layers.0.attention.keys.*which tasks write": _rewrite,
}


@pytest.mark.parametrize("message", FIRST)
def test_caches_changed_in_the_iteration_are_read_in_place(
    message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that the iteration changes before attention reads it is not streamed. The verifier
    refuses a plan that streams it nevertheless.
    """
    target = machine(4, Capability.PACKETS)
    planned = plan_graph(_graph(FIRST[message]), target)
    verify([planned])
    assert len(growing(planned)) < len(growing(decoder(target)))
    monkeypatch.setattr(attention_lowering, "are_older", lambda *_: True)
    forged = plan_graph(_graph(FIRST[message]), target)
    with pytest.raises(PlanError, match=message):
        verify([forged])


@pytest.mark.parametrize("message", FIRST)
def test_early_reads_of_changed_memory_select_another_variant(
    message: str,
) -> None:
    """The bodies of the `roles` variant would read the cache too early, so the planner chooses
    another.
    """
    target = registry.machine("h100")
    usual, other = (
        plan_graph(_graph(lambda *_: None), target),
        plan_graph(_graph(FIRST[message]), target),
    )
    assert (usual.variant_of(0), other.variant_of(0)) == ("roles", "block")
    verify([other])


def test_stages_that_a_ring_cannot_hold_are_refused() -> None:
    decoder_plan = decoder(offers_roles())
    variant = {**decoder_plan.machine["variants"][0], "stage_bytes": 2048}
    changed = dataclasses.replace(
        decoder_plan, machine={**decoder_plan.machine, "variants": (variant,)}
    )
    with pytest.raises(PlanError, match="stages of 4096 bytes, but a stage of the ring has 2048"):
        verify([changed])


def test_growing_fetch_is_one_record_with_its_growth() -> None:
    """The records from which the device makes growing fetches contain the plan's numbers: the
    address of the rows, the largest number of rows, and which part of the positions the task has.
    """
    planned = decoder(machine(4, Capability.PACKETS), chunk=4)
    built = tables.build(planned, [0] * len(planned.ops), lambda b: b << 32, lambda c: 64 * c)
    tasks = [t for p in planned.phases for own in p.processors for t in own]
    assert len(built.growths) == len(growing(planned))
    for record, task in zip(built.tasks, tasks, strict=True):
        if not any(f.growth for f in task.fetches):
            assert record["growth"] == 0
            continue
        (fetch,) = task.fetches
        assert record["fetch_end"] - record["fetch_begin"] == 1
        row = built.growths[record["growth"] - 1]
        keys, values, place = (
            planned.tensors[planned.ops[task.op].operands[i]]
            for i in (fetch.operand, fetch.growth.beside, fetch.growth.length)
        )
        head = task.coord[1]
        assert row["address"] == (keys.buffer << 32) + head * ROOM_POSITIONS * 64
        assert row["beside"] == (values.buffer << 32) + head * ROOM_POSITIONS * 64
        assert row["length"] == place.buffer << 32
        assert (row["row"], row["rows"], row["step"]) == (64, ROOM_POSITIONS, fetch.stage // 64)
        assert (row["part"], row["parts"]) == (task.coord[2], fetch.growth.parts)
    starts = np.flatnonzero(built.fetches["form"])
    assert len(starts) == len(built.growths)
