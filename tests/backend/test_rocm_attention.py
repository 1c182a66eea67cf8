"""AMD's attention of one row, executed on the emulator and compared with NumPy in double precision.
A wave computes one head, several, or a part of one. The partial results travel as packets or, if
there are too many, in plain memory. Some numbers of positions are a multiple of the number that a
wave loads at once, others are not.
"""

from __future__ import annotations

import contextlib
import dataclasses

import ml_dtypes
import numpy as np
import pytest
from ark_rocm import backend
from ark_rocm.tasks import attention

from ark.ir.dtype import bf16, fp32, int32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.plan import kind as kinds
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.rocm_compile import machine_for
from tests.slow import in_turns

emulator = pytest.importorskip("ark_rocm_emulator")

pytestmark = pytest.mark.emulated("slow")

# The calls of attention: (heads, key heads, width of a head, rows of the cache, position).
CASES = [
    (4, 1, 64, 512, 511),  # one head for two waves
    (8, 2, 64, 320, 130),
    (8, 1, 128, 200, 77),  # as many heads as waves
    (3, 1, 64, 130, 128),  # three heads for every wave
    (12, 2, 32, 130, 64),  # six query heads for each key head: two groups
    (2, 2, 32, 64, 0),  # only the newest position
]


def attend(
    heads: int, kv_heads: int, width: int, room: int, position: int, sinks: bool = False
) -> tuple[Plan, dict[str, np.ndarray]]:
    """Runs attention and compares it. Returns the plan, and the plain memory that its merges have
    read.
    """
    random = np.random.default_rng(heads + position)
    shapes = {"q": (1, heads * width), "fresh": (1, 2 * kv_heads * width)}
    given = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    cache = (kv_heads, room, width)
    for name in ("keys", "values"):
        given[name] = random.standard_normal(cache).astype(ml_dtypes.bfloat16)
    given["position"] = np.array([position], np.int32)
    if sinks:
        given["sinks"] = random.standard_normal(heads).astype(np.float32) * 4
    graph = Graph()
    types = {
        "q": fp32,
        "fresh": fp32,
        "sinks": fp32,
        "keys": bf16,
        "values": bf16,
        "position": int32,
    }
    t = {
        name: graph.tensor(array.shape, types[name], arena="state", name=name)
        for name, array in given.items()
    }
    out = graph.tensor((1, heads * width), fp32, arena="state", name="out")
    attrs = {"heads": heads, "head_dim": width, "scale": width**-0.5, "sinks": sinks}
    names = ("q", "keys", "values", "position", "sinks", "fresh")
    inputs = [t[name] for name in names if name in t]
    graph.add("attention", inputs, [out], attrs, "attention")
    with contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        (op,) = (op for op in planned.ops if op.kind == "attention")
        assert attention.OneRow().serves(kinds.signature(planned, op), device.machine)
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = executor.read("out").reshape(heads, width)
            merges = (op for op in planned.ops if op.kind == "attention_merge")
            read = [planned.tensors[op.operands[0]] for op in merges]
            parts = {t.name: executor.read(t.name) for t in read if not t.packet}
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    new = wide["fresh"].reshape(2, kv_heads, width)
    for head in range(heads):
        group = head * kv_heads // heads
        k = np.concatenate([wide["keys"][group, :position], new[0, group][None]])
        v = np.concatenate([wide["values"][group, :position], new[1, group][None]])
        scores = k @ wide["q"].reshape(heads, width)[head] * width**-0.5
        if sinks:
            scores = np.append(scores, given["sinks"][head])
        weights = np.exp(scores - scores.max())
        want = weights[: len(v)] / weights.sum() @ v
        np.testing.assert_allclose(got[head], want, rtol=1e-5, atol=1e-5)
    return planned, parts


@pytest.mark.parametrize(
    ("arch", "heads", "kv_heads", "width", "room", "position"),
    in_turns(("gfx942", "gfx1100"), CASES),
    indirect=["arch"],
)
def test_attention_of_a_row(
    arch: str, heads: int, kv_heads: int, width: int, room: int, position: int
) -> None:
    del arch
    attend(heads, kv_heads, width, room, position)


@pytest.mark.parametrize("arch", ["gfx950", "gfx1100"], indirect=True)
def test_sinks_are_joined_with_the_parts(arch: str) -> None:
    del arch
    planned, _ = attend(8, 2, 64, 320, 130, sinks=True)
    (merge,) = (op for op in planned.ops if op.kind == "attention_merge")
    assert len(merge.operands) == 3


def test_parts_that_are_too_many_for_packets() -> None:
    """Attention in so many parts that the merging task would read 4,160 elements: parts are then in
    plain memory, and a counter signals them.
    """
    with emulator.emulated("gfx942", checks=1, compute_units=32):
        planned, parts = attend(8, 1, 128, 32768, 1500)
    (merge,) = (op for op in planned.ops if op.kind == "attention_merge")
    assert merge.params["splits"] == 32
    assert not planned.tensors[merge.operands[0]].packet
    # The context of 1,501 positions fills 11 of the 32 parts. Only these have a nonzero weight.
    (weights,) = (array.reshape(8, 32, 130)[:, :, 129] for array in parts.values())
    assert ((weights > 0).sum(1) == 11).all() and (weights[:, :11] > 0).all()


@pytest.mark.parametrize(
    ("heads", "width", "room", "splits"),
    [(32, 64, 520, 8), (32, 64, 16384, 25), (32, 128, 4096, 15)],
)
def test_parts_travel_as_packets(heads: int, width: int, room: int, splits: int) -> None:
    """For any context length, the parts of attention travel as packets of at most 256 KB, on 304
    processors in 38 parts per head.
    """
    machine = dataclasses.replace(machine_for("gfx942"), processors=304)
    graph = Graph()
    shapes = {"q": (1, heads * width), "fresh": (1, 16 * width)}
    given = [graph.tensor(s, fp32, arena="state", name=n) for n, s in shapes.items()]
    caches = [graph.tensor((8, room, width), bf16, arena="state", name=n) for n in ("k", "v")]
    position = graph.tensor((1,), int32, arena="state", name="position")
    out = graph.tensor((1, heads * width), fp32, arena="state", name="out")
    attrs = {"heads": heads, "head_dim": width, "scale": width**-0.5}
    graph.add("attention", [given[0], *caches, position, given[1]], [out], attrs, "attention")
    planned = plan(graph, machine)
    (merge,) = (op for op in planned.ops if op.kind == "attention_merge")
    assert merge.params["splits"] == splits
    assert planned.tensors[merge.operands[0]].packet


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx90a"])
@pytest.mark.parametrize("width", [64, 48])
def test_tasks_of_several_sequences_divide_the_heads(arch: str, width: int) -> None:
    """Attention of two sequences, in four tasks for each key head. Each task computes one of the
    four query heads over all positions, so that nothing is merged, and has a processor of its own.
    Heads of 48 elements use the vendor-independent body.
    """
    batch, heads, kv_heads, room, positions = 2, 8, 2, 320, (130, 7)
    random = np.random.default_rng(width)
    shapes = {"q": (batch, heads * width), "fresh": (batch, 2 * kv_heads * width)}
    given = {n: random.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    for name in ("keys", "values"):
        cache = (batch * kv_heads, room, width)
        given[name] = random.standard_normal(cache).astype(ml_dtypes.bfloat16)
    given["position"] = np.array(positions, np.int32)
    types = {"q": fp32, "keys": bf16, "values": bf16, "position": int32, "fresh": fp32}
    graph = Graph()
    inputs = [graph.tensor(given[n].shape, types[n], arena="state", name=n) for n in types]
    out = graph.tensor((batch, heads * width), fp32, arena="state", name="out")
    attrs = {"heads": heads, "head_dim": width, "scale": width**-0.5}
    graph.add("attention", inputs, [out], attrs, "attention")
    emulated = emulator.emulated(arch, checks=1, compute_units=16)
    with emulated, contextlib.closing(backend.open(0)) as device:
        planned = plan(graph, device.machine)
        verify([planned])
        assert {op.kind for op in planned.ops} == {"attention"}
        own = [
            attention.OneRow().serves(kinds.signature(planned, op), device.machine)
            for op in planned.ops
        ]
        assert own == [width == 64] * batch
        assert all(op.params["shares"] == 4 for op in planned.ops)
        with Executor(planned, backend, device) as executor:
            for name, array in given.items():
                executor.write(name, array)
            executor.start(2).wait()
            got = executor.read("out").reshape(batch, heads, width)
    wide = {name: array.astype(np.float64) for name, array in given.items()}
    for b, head in np.ndindex(batch, heads):
        cached = b * kv_heads + head // 4, slice(positions[b])
        new = wide["fresh"][b].reshape(2, kv_heads, width)[:, head // 4]
        k = np.concatenate([wide["keys"][cached], new[:1]])
        v = np.concatenate([wide["values"][cached], new[1:]])
        scores = k @ wide["q"][b].reshape(heads, width)[head] * width**-0.5
        weights = np.exp(scores - scores.max())
        np.testing.assert_allclose(got[b, head], weights / weights.sum() @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sinks", "merges"), [(False, 0), (True, 2)])
def test_sequences_with_sinks_have_merges(sinks: bool, merges: int) -> None:
    """The query heads of several sequences are divided among tasks, but only a merge adds sinks."""
    machine = dataclasses.replace(machine_for("gfx942"), processors=16)
    graph = Graph()
    caches = [graph.tensor((4, 320, 64), bf16, arena="state", name=n) for n in ("k", "v")]
    shapes = {"q": (2, 512), "fresh": (2, 256), "sinks": (8,)}
    q, fresh, added = (graph.tensor(s, fp32, arena="state", name=n) for n, s in shapes.items())
    position = graph.tensor((2,), int32, arena="state", name="position")
    out = graph.tensor((2, 512), fp32, arena="state", name="out")
    attrs = {"heads": 8, "head_dim": 64, "scale": 0.125, "sinks": sinks}
    inputs = [q, *caches, position, *[added] * sinks, fresh]
    graph.add("attention", inputs, [out], attrs, "attention")
    planned = plan(graph, machine)
    assert [op.kind for op in planned.ops].count("attention_merge") == merges
