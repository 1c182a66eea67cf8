"""Ops of ARK's 2026 interface: kv_cache_slot, and the graph names of all-reduces."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ark
from ark.lower import registry


def nodes() -> list[dict[str, Any]]:
    return json.loads(ark.Model.get_model().serialize())["Nodes"]


@pytest.mark.parametrize("dtype", [ark.fp32, ark.fp16, ark.bf16])
def test_token_is_written_where_the_position_says(dtype: ark.DataType) -> None:
    memory = torch.zeros(5, 2, 3, dtype=dtype.to_torch())
    wide = ark.tensor([2, 6], dtype)  # the slice read below is a part of each row
    position = ark.tensor([1], ark.int32)
    written = ark.kv_cache_slot(memory, wide[:, 3:6], position, name="slot")
    doubled = ark.mul(written, 2.0)
    assert (written.shape(), written.dtype()) == ([2, 3], dtype)
    want = torch.zeros_like(memory)
    with ark.Runtime() as runtime:
        runtime.launch()
        for at in (4, 0, 5, -1):
            token = torch.arange(12, dtype=torch.float32).reshape(2, 6) + at
            wide.copy(token)
            position.from_numpy(np.array([at]))
            runtime.run()
            part = token[:, 3:6].to(want.dtype)
            if 0 <= at < 5:
                want[at] = part
            torch.testing.assert_close(memory, want, rtol=0, atol=0)
            assert doubled.to_numpy().astype(float).tolist() == (2 * part).tolist()


def test_writes_to_one_cache_are_ordered() -> None:
    cache = ark.placeholder([8, 4], ark.fp32, data=(memory := torch.zeros(8, 4)))
    tokens = [ark.tensor([4], ark.fp32) for _ in range(3)]
    position = ark.tensor([1], ark.int32)
    for token in tokens[:2]:
        ark.kv_cache_slot(cache, token, position)
    seen = ark.copy(cache)
    ark.kv_cache_slot(cache, tokens[2], position)
    first, second, read, third = nodes()
    assert first["Op"]["Type"] == "KvCacheSlot"
    assert first["Id"] in second["ProducerNodeIds"] and second["Id"] in third["ProducerNodeIds"]
    with ark.Runtime() as runtime:
        runtime.launch()
        for value, token in enumerate(tokens, start=1):
            token.from_numpy(np.full(4, value))
        position.from_numpy(np.array([6]))
        runtime.run()
        assert memory[6].tolist() == [3.0] * 4 and memory[:6].abs().max() == 0
        reference = registry.get("kv_cache_slot").reference
        for at, want in ((6, [0, 9]), (8, [0, 0]), (-1, [0, 0])):
            got, token = reference([np.full(4, 9), np.array([at]), np.zeros((8, 4))], {})
            assert got[[0, 6], 3].tolist() == want and token.tolist() == [9] * 4
        assert read["Id"] == 2 and seen.to_numpy()[6].tolist() == [2.0] * 4


def test_part_of_a_cache_is_a_cache() -> None:
    whole = ark.tensor([6, 2, 2], ark.fp32)
    token, position = ark.tensor([2, 2], ark.fp32), ark.tensor([1], ark.int32)
    ark.kv_cache_slot(whole[2:5], token, position)
    with ark.Runtime() as runtime:
        runtime.launch()
        token.from_numpy(np.ones((2, 2)))
        for at in (1, 3):  # 3 is past the end of the part
            position.from_numpy(np.array([at]))
            runtime.run()
        assert whole.to_numpy().sum((1, 2)).tolist() == [0, 0, 0, 4, 0, 0]


def slot(cache: Any, shape: Any = (4, 2), dtype: Any = ark.fp16, at: Any = ark.int32) -> Any:
    size = 2 if at is None else 1
    return ark.kv_cache_slot(cache, ark.tensor(shape, dtype), ark.tensor([size], at or ark.int32))


@pytest.mark.parametrize(
    "call",
    [
        lambda c: slot(c, (2, 4)),
        lambda c: slot(c, (1, 4, 2)),
        lambda c: slot(c, dtype=ark.fp32),
        lambda c: slot(c, at=ark.fp32),
        lambda c: slot(c, at=ark.uint32),
        lambda c: slot(c, at=None),
        lambda c: slot(c[:, :2], (2, 2)),
        lambda c: slot(ark.tensor([8], ark.fp16), (1,)),
        lambda c: slot(ark.tensor([8, 2], ark.int32), (2,), ark.int32),
        lambda c: slot(torch.zeros(8, 2, 4, dtype=torch.float16).transpose(1, 2)),
    ],
)
def test_mismatched_cache_shapes_are_model_errors(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ark.ModelError, match=r"kv_cache_slot|ark\.cast"):
        call(ark.tensor([8, 4, 2], ark.fp16))


def reduced(op: str, shape: list[int], rank: int = 0, world: int = 2, **more: Any) -> Any:
    """Returns the nodes of a serialised model with one all-reduce."""
    ark.Model.reset()
    ark.set_rank(rank)
    ark.set_world_size(world)
    x = ark.tensor(shape, more.get("dtype", ark.fp16))
    y = getattr(ark, op)(x, rank, world, x if more.get("in_place") else ark.NullTensor)
    assert y.shape() == shape
    return nodes()


@pytest.mark.parametrize(
    ("op", "shape", "rank", "name"),
    [
        ("all_reduce_packet", [1024], 0, "all_reduce_packet"),
        ("all_reduce", [1, 4096], 0, "all_reduce_packet"),
        ("all_reduce", [2048, 4096], 1, "all_reduce_prefill"),
        ("all_reduce_prefill", [2048 * 4096], 1, "all_reduce_prefill"),
    ],
)
def test_fused_all_reduces_have_arks_names(op: str, shape: Any, rank: int, name: str) -> None:
    for in_place in (False, True):
        (node,) = reduced(op, shape, rank, in_place=in_place)
        assert (node["Op"]["Type"], node["Op"]["Name"]) == ("AllReducePacketFused", name)


@pytest.mark.parametrize(
    ("shape", "world", "dtype"),
    [([4097], 2, ark.fp16), ([4096], 2, ark.fp32), ([2048, 4096], 9, ark.fp16), ([8], 1, ark.fp16)],
)
def test_all_reduce_prefill_refuses_other_sizes(shape: Any, world: int, dtype: Any) -> None:
    with pytest.raises(ark.ModelError, match="8388608 fp16 elements on 2 to 8 ranks"):
        reduced("all_reduce_prefill", shape, 0, world, dtype=dtype)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_other_all_reduces_are_rings_that_sum_all_shares(world: int, in_place: bool) -> None:
    """The serialised nodes of all ranks are interpreted. All-reduces other than the default are
    serialised as rings. Every rank must end with the sum.
    """
    programs = [reduced("all_reduce", [4097], r, world, in_place=in_place) for r in range(world)]
    mail: dict[tuple[int, int, int], int] = {}
    memory: list[dict[int, int]] = [{} for _ in range(world)]

    def run(rank: int, node: dict[str, Any]) -> None:
        op = node["Op"]
        read = [memory[rank].get(t["Buffer"]["Id"], 10**rank) for t in op["ReadTensors"]]
        peer = op["Args"].get("remote_rank", {}).get("INT")
        tag = op["Args"].get("tag", {}).get("INT")
        if op["Type"] == "Send":
            mail[rank, peer, tag] = read[0]
        else:
            value = mail.pop((peer, rank, tag)) if op["Type"] == "Recv" else sum(read)
            memory[rank][op["WriteTensors"][0]["Buffer"]["Id"]] = value

    for step in range(len(programs[0])):
        for kind in ("Copy", "Send", "Recv", "Add"):
            for rank, program in enumerate(programs):
                assert program[step]["Id"] == step
                if program[step]["Op"]["Type"] == kind:
                    run(rank, program[step])
    kinds = [node["Op"]["Type"] for node in programs[0]]
    assert kinds == ["Copy", *["Send", "Recv", "Add"] * (world - 1)] and not mail
    for rank, program in enumerate(programs):
        last = program[-1]["Op"]["WriteTensors"][0]["Buffer"]["Id"]
        assert memory[rank][last] == int("1" * world)


def test_nodes_behind_a_ring_name_its_last_node() -> None:
    ark.set_world_size(2)
    x = ark.tensor([4097], ark.fp16)
    ark.relu(ark.all_reduce(ark.exp(x), 0, 2))
    listed = nodes()
    assert [n["Id"] for n in listed] == list(range(6)) and listed[1]["ProducerNodeIds"] == [0]
    assert listed[5]["Op"]["Type"] == "Relu" and listed[5]["ProducerNodeIds"] == [4]
    assert listed[4]["ConsumerNodeIds"] == [5]
