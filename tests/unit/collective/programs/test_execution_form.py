"""MSCCL++ execution plans, interpreted as MSCCL++'s executor does, and read back."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from ark.collective import classics
from ark.collective.programs import (
    IN,
    OUT,
    Collective,
    CollectiveProgram,
    ProgramBuilder,
    Span,
    execute,
    from_execution_plan,
    reference_result,
    to_execution_plan,
)
from ark.collective.synthesis import algorithms, synthesize
from ark.collective.topology import named
from ark.errors import ModelError, PlanError, UnsupportedError
from tests.cases.msccl_read import ROUNDS

MOST_OPS, MOST_CHANNELS, MOST_PER_OP, MOST_SEMAPHORES = 64, 16, 8, 16


def needed_fields(plan: dict[str, Any]) -> None:
    """Asserts that a plan has all fields for which MSCCL++'s executor has no default."""
    assert {"name", "collective", "protocol", "inplace", "gpus"} <= plan.keys()
    for gpu in plan["gpus"]:
        parts = {"threadblocks", "channels", "remote_buffers"}
        assert {"id", "input_chunks", "output_chunks", "scratch_chunks", *parts} <= gpu.keys()
        assert gpu["input_chunks"] and gpu["output_chunks"]  # the executor divides sizes by these
        for channels in gpu["channels"]:
            assert {"channel_type", "connected_to"} <= channels.keys()
        for buffer in gpu["remote_buffers"]:
            assert {"rank", "type", "access_channel_types"} <= buffer.keys()
        for block in gpu["threadblocks"]:
            assert {"id", "ops", "channels"} <= block.keys()
            assert all({"channel_type", "channel_ids"} <= each.keys() for each in block["channels"])
            for op in block["ops"]:
                chunks = [*op.get("src_buff", []), *op.get("dst_buff", [])]
                assert all({"index", "size"} <= each.keys() for each in chunks)


class Machine:
    """A model of MSCCL++'s executor: blocks run concurrently in a random order, a thread block's
    operations may complete late until its threads synchronise (nop), and offsets are in bytes.
    """

    def __init__(self, text: str, inputs: list[np.ndarray], seed: int) -> None:
        self.plan = json.loads(text)
        needed_fields(self.plan)
        assert self.plan["protocol"] == "Simple" and self.plan["inplace"] is False
        self.gpus = self.plan["gpus"]
        self.random = random.Random(seed)
        self.size = inputs[0].nbytes // self.gpus[0]["input_chunks"]
        self.memory = []
        for rank, gpu in enumerate(self.gpus):
            assert gpu["id"] == rank
            out = np.full(gpu["output_chunks"] * self.size // 8, -(10**9))
            scratch = np.full(gpu["scratch_chunks"] * self.size // 8, -(10**9))
            self.memory.append({"i": inputs[rank].copy(), "o": out, "s": scratch})
        self.other = self.channels()
        self.signals: Counter[tuple[int, int]] = Counter()
        self.semaphores: Counter[tuple[int, int]] = Counter()
        self.behind: set[tuple[int, int]] = set()  # blocks in which some threads have waited

    def channels(self) -> dict[tuple[int, int], tuple[int, int]]:
        ends: dict[tuple[int, int], list[int]] = {}
        for rank, gpu in enumerate(self.gpus):
            flat = [p for c in gpu["channels"] for p in c.get("connected_to", [])]
            for number, peer in enumerate(flat):
                ends.setdefault((rank, peer), []).append(number)
        return {
            (rank, one): (peer, other)
            for (rank, peer), here in ends.items()
            for one, other in zip(here, ends[peer, rank], strict=True)
        }

    def view(self, rank: int, place: str, chunks: dict[str, Any]) -> np.ndarray:
        start, size = chunks["index"] * self.size // 8, chunks["size"] * self.size // 8
        memory = self.memory[rank][place]
        assert size > 0 and start + size <= len(memory)
        return memory[start : start + size]

    def run(self) -> list[np.ndarray]:
        blocks = [
            (rank, block, iter(block["ops"]))
            for rank, gpu in enumerate(self.gpus)
            for block in gpu["threadblocks"]
        ]
        for gpu in self.gpus:
            assert len(gpu.get("semaphores", [])) <= MOST_SEMAPHORES
            assert [b["id"] for b in gpu["threadblocks"]] == list(range(len(gpu["threadblocks"])))
        state = [[next(ops, None), []] for _, _, ops in blocks]
        results: dict[int, np.ndarray] = {}
        left = Counter(rank for rank, _, _ in blocks)
        while left.total():
            order = list(range(len(blocks)))
            self.random.shuffle(order)
            moved = False
            for i in order:
                rank, block, ops = blocks[i]
                op, late = state[i]
                if op is None or not self.step(rank, block, op, late):
                    continue
                moved = True
                state[i][0] = next(ops, None)
                if state[i][0] is None:
                    self.finish(late)
                    left[rank] -= 1
                    if not left[rank]:
                        results[rank] = self.memory[rank]["o"].copy()
            assert moved, "the plan never ends"
        return [results[rank] for rank in range(len(self.gpus))]

    def finish(self, late: list) -> None:
        self.random.shuffle(late)
        for target, value in late:
            target[:] = value()
        late.clear()

    def step(self, rank: int, block: dict[str, Any], op: dict[str, Any], late: list) -> bool:
        assert len(block["ops"]) <= MOST_OPS
        ids = [i for c in block["channels"] for i in c["channel_ids"]]
        refs = [i for r in block.get("remote_buffer_refs", []) for i in r["remote_buffer_ids"]]
        assert len(ids) <= MOST_CHANNELS and len(refs) <= MOST_CHANNELS
        assert all(len(op.get(k, [])) <= MOST_PER_OP for k in ("channel_ids", "src_buff"))
        used = [(rank, ids[i]) for i in op.get("channel_ids", [])]
        name = op["name"]
        here = (rank, block["id"])
        assert name not in ("put", "copy", "re") or here not in self.behind
        if name == "nop":
            self.finish(late)
            self.behind.discard(here)
        elif name == "signal":
            assert not late, "what is signalled may not have ended"
            for channel in used:
                self.signals[self.other[channel]] += 1
        elif name == "wait":
            assert len(set(used)) == len(used)
            if not all(self.signals[channel] for channel in used):
                return False
            self.signals.subtract(used)
            self.behind.add(here)
        elif name == "sem_release":
            assert not late
            self.semaphores.update((rank, i) for i in op["semaphore_ids"])
        elif name == "sem_acquire":
            keys = [(rank, i) for i in op["semaphore_ids"]]
            if not all(self.semaphores[key] for key in keys):
                return False
            self.semaphores.subtract(keys)
            self.behind.add(here)
        elif name == "put":
            (src,), (dst,) = op["src_buff"], op["dst_buff"]
            buffer = self.gpus[rank]["remote_buffers"][refs[dst["buffer_id"]]]
            assert op["channel_type"] == "memory"
            assert self.other[used[0]][0] == buffer["rank"]
            source = self.view(rank, src["type"], src)
            late.append((self.view(buffer["rank"], buffer["type"], dst), lambda: source.copy()))
        else:
            assert name in ("copy", "re") and len(op["dst_buff"]) == 1
            sources = [self.view(rank, each["type"], each) for each in op["src_buff"]]
            assert len(sources) == 1 or name == "re"
            target = self.view(rank, op["dst_buff"][0]["type"], op["dst_buff"][0])
            late.append((target, lambda: sum(sources[1:], sources[0].copy())))
        return True


def data(program: CollectiveProgram) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    slots = program.buffer_by_name["in"].slots
    return [rng.integers(0, 99, 2 * slots) for _ in range(program.ranks)]


def is_right(program: CollectiveProgram, seeds: int = 3) -> None:
    inputs, text = data(program), to_execution_plan(program)
    wanted = reference_result(program.collective, inputs, root=program.root)
    result = [Machine(text, inputs, seed).run() for seed in range(seeds)]
    result.append(execute(from_execution_plan(text, root=program.root or 0), inputs))
    for outputs in result:
        for got, want in zip(outputs, wanted, strict=True):
            if want is not None:
                np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("world", "collective", "algorithm"), ROUNDS)
def test_plan_is_right_and_read_with_the_same_results(
    world: int, collective: str, algorithm: str
) -> None:
    is_right(synthesize(named(f"full{world}"), collective, algorithm, pieces=1))


@pytest.mark.parametrize("name", ["ring8", "a100", "mi300x", "dgx1v", "a100x2", "mesh3x3"])
def test_plans_on_named_topologies_are_right(name: str) -> None:
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        is_right(synthesize(named(name), collective), seeds=1)


def test_long_chain_goes_on_in_another_block() -> None:
    b = ProgramBuilder("chain", "broadcast", 2, 1, root=0)
    b.scratch(100)
    b.copy(0, Span(IN, 0), Span("scratch", 0))
    for i in range(99):
        b.copy(0, Span("scratch", i), Span("scratch", i + 1))
    b.copy(0, Span("scratch", 99), Span(OUT, 0))
    b.put(0, 1, Span(OUT, 0), Span(OUT, 0))
    assert "sem_acquire" in to_execution_plan(b.build())
    is_right(b.build())


def test_programs_beyond_executor_limits_are_refused() -> None:
    b = ProgramBuilder("chain", "broadcast", 1, 1, root=0)
    b.scratch(2000)
    b.copy(0, Span(IN, 0), Span("scratch", 0))
    for i in range(1999):
        b.copy(0, Span("scratch", i), Span("scratch", i + 1))
    b.copy(0, Span("scratch", 1999), Span(OUT, 0))
    with pytest.raises(UnsupportedError, match="MSCCL\\+\\+ allows"):
        to_execution_plan(b.build())


def test_many_sources_are_added_in_parts() -> None:
    is_right(classics.build("one_shot", Collective.ALL_REDUCE, 12), seeds=1)


def damaged(text: str, name: str) -> str:
    """Returns the plan without its last operation of this name on GPU 1."""
    plan = json.loads(text)
    for block in reversed(plan["gpus"][1]["threadblocks"]):
        for i in reversed(range(len(block["ops"]))):
            if block["ops"][i]["name"] == name:
                del block["ops"][i]
                return json.dumps(plan)
    raise AssertionError(name)


def test_plan_that_forgets_a_wait_is_refused() -> None:
    text = to_execution_plan(synthesize(named("ring4"), "all_gather", "ring"))
    plan = json.loads(text)
    for block in plan["gpus"][1]["threadblocks"]:
        block["ops"] = [op for op in block["ops"] if op["name"] != "wait"]
    with pytest.raises(PlanError):
        from_execution_plan(json.dumps(plan))
    with pytest.raises(ModelError, match="never ends"):
        from_execution_plan(damaged(text, "signal"))
    with pytest.raises(PlanError):
        from_execution_plan(damaged(text, "put"))


def test_inexpressible_programs_are_refused() -> None:
    ring = synthesize(named("ring4"), "all_reduce", "ring")
    with pytest.raises(UnsupportedError, match="pieces"):
        to_execution_plan(dataclasses.replace(ring, pieces=2))
    with pytest.raises(UnsupportedError, match="reduces by sum only"):
        to_execution_plan(synthesize(named("ring4"), "all_reduce", "ring", reduction="max"))


BAD = {
    "no JSON": ("{", "does not fit"),
    "another field": ('"inplace"', '"in_place"', "does not fit"),
    "a rank beyond": ('"rank": 1', '"rank": 7', "gpu 7|no other end|never"),
    "no such operation": ('"nop"', '"jump"', "jump"),
    "numbers in disorder": ('"id": 1,\n   "input', '"id": 2,\n   "input', "in order"),
    "an endless number": ('"index": 1', f'"index": {"9" * 300}', "does not fit"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_invalid_plans_are_refused(case: str) -> None:
    text = to_execution_plan(synthesize(named("ring4"), "all_gather", "ring"))
    *change, match = BAD[case]
    if len(change) == 2:
        assert change[0] in text
        text = text.replace(change[0], change[1])
    else:
        text = change[0]
    with pytest.raises((ModelError, UnsupportedError), match=match):
        from_execution_plan(text)


def all_pairs(world: int, place: str) -> str:
    """Returns an in-place all-reduce as MSCCL++'s own tools write it: every rank reads its part of
    the data from all others, reduces it, and writes the sum to all others.
    """
    gpus = []
    for r in range(world):
        peers = [p for p in range(world) if p != r]
        every = list(range(len(peers)))
        far = [{"buffer_id": i, "index": r, "size": 1} for i in every]
        own = {"type": place, "index": r, "size": 1}
        meet = [
            {"name": "signal", "channel_type": "memory", "channel_ids": every},
            {"name": "wait", "channel_type": "memory", "channel_ids": every},
            {"name": "nop"},
        ]
        work = {"name": "rres", "channel_type": "memory", "src_buff": [own, *far],
                "dst_buff": [own, *far]}  # fmt: skip
        gpus.append(
            {
                "id": r, "input_chunks": world, "output_chunks": world, "scratch_chunks": 0,
                "threadblocks": [{
                    "id": 0, "ops": [*meet, work, {"name": "nop"}, *meet[:2]],
                    "channels": [{"channel_type": "memory", "channel_ids": every}],
                    "remote_buffer_refs": [
                        {"access_channel_type": "memory", "remote_buffer_ids": every}],
                }],
                "channels": [{"channel_type": "memory", "connected_to": peers}],
                "remote_buffers": [
                    {"rank": p, "type": place, "access_channel_types": ["memory"]} for p in peers],
            }
        )  # fmt: skip
    return json.dumps({"name": "pairs", "collective": "allreduce", "protocol": "Simple",
                       "inplace": True, "reuse_resources": False, "gpus": gpus})  # fmt: skip


@pytest.mark.parametrize("world", [2, 4])
def test_plan_in_place_that_reads_its_peers_is_read(world: int) -> None:
    inputs = [np.arange(2 * world) + 100 * r for r in range(world)]
    for result in execute(from_execution_plan(all_pairs(world, "i")), inputs):
        np.testing.assert_array_equal(result, sum(inputs))


def test_every_algorithm_of_a_box_has_a_plan() -> None:
    topology = named("h100")
    for collective in ("all_gather", "all_reduce"):
        for algorithm in algorithms(topology, collective):
            if algorithm != "taccl":
                is_right(synthesize(topology, collective, algorithm), seeds=1)
