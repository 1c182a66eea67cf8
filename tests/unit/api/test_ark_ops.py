"""Ops of ARK's 2026 interface: kv_cache_slot."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ark
from ark.lower import registry


@pytest.fixture(autouse=True)
def fresh() -> None:
    ark.init(backend="cpu", rank=0, world_size=1)


def nodes() -> list[dict[str, Any]]:
    return json.loads(ark.Model.get_model().serialize())["Nodes"]


@pytest.mark.parametrize("dtype", [ark.fp32, ark.fp16, ark.bf16])
def test_a_token_is_written_where_the_position_says(dtype: ark.DataType) -> None:
    memory = torch.zeros(5, 2, 3, dtype=dtype.to_torch())
    wide = ark.tensor([2, 6], dtype)  # the token is a part of each row
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


def test_a_part_of_a_cache_is_a_cache() -> None:
    whole = ark.tensor([6, 2, 2], ark.fp32)
    token, position = ark.tensor([2, 2], ark.fp32), ark.tensor([1], ark.int32)
    ark.kv_cache_slot(whole[2:5], token, position)
    with ark.Runtime() as runtime:
        runtime.launch()
        token.from_numpy(np.ones((2, 2)))
        for at in (1, 3):  # 3 is past the part's end
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
def test_what_does_not_fit_a_cache_is_a_model_error(call: Callable[[Any], Any]) -> None:
    with pytest.raises(ark.ModelError, match=r"kv_cache_slot|ark\.cast"):
        call(ark.tensor([8, 4, 2], ark.fp16))
