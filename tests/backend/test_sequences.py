"""Ops with a position for each row: each row belongs to another sequence and is computed as if
alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import ark
from ark.lower import registry
from ark.ops.tokens import MAX_STOPS
from ark.plan.verify import work

BATCH, HEADS, KV_HEADS, WIDTH, CONTEXT, VOCABULARY = 3, 4, 2, 16, 11, 9
POSITIONS = np.array([0, 10, 4])


def values(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


GIVEN = {
    "tokens": np.arange(BATCH * CONTEXT) % VOCABULARY,
    "table": values(VOCABULARY, 24, seed=1),
    "position": POSITIONS,
    "query": values(BATCH, HEADS * WIDTH, seed=2),
    "key": values(BATCH, KV_HEADS * WIDTH, seed=3),
    "frequencies": 10000.0 ** -np.linspace(0.0, 0.9, WIDTH // 2),
    "keys": values(BATCH * KV_HEADS, CONTEXT, WIDTH, seed=4),
    "values": values(BATCH * KV_HEADS, CONTEXT, WIDTH, seed=5),
    "joined": values(BATCH, (HEADS + 2 * KV_HEADS) * WIDTH, seed=6),
}
SHARED = ("table", "frequencies")
SIZES = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": WIDTH}
# By op: its inputs, and the attributes for its reference.
OPS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "embed": (("tokens", "table", "position"), {"rows": 1}),
    "rotary_embedding": (
        ("query", "position", "frequencies"),
        {"head_dim": WIDTH, "interleaved": False},
    ),
    "kv_append": (("key", "position", "keys"), {}),
    "attention": (
        ("query", "keys", "values", "position"),
        {"heads": HEADS, "head_dim": WIDTH, "scale": WIDTH**-0.5},
    ),
    "rope_kv": (("joined", "position", "frequencies", "keys", "values"), SIZES),
}


def alone(op: str) -> list[np.ndarray]:
    """Returns the op's reference for each sequence alone, concatenated."""
    names, attrs = OPS[op]
    results = []
    for b in range(BATCH):
        own = [GIVEN[n] if n in SHARED else np.split(GIVEN[n], BATCH)[b] for n in names]
        results.append(registry.get(op).reference(own, attrs))  # type: ignore[misc]
    return [np.concatenate(parts) for parts in zip(*results, strict=True)]


def test_references_are_those_of_each_sequence() -> None:
    for op, (names, attrs) in OPS.items():
        batched = registry.get(op).reference([GIVEN[n] for n in names], attrs)  # type: ignore[misc]
        for got, want in zip(batched, alone(op), strict=True):
            np.testing.assert_array_equal(got, want, err_msg=op)


def test_each_sequence_is_computed_as_if_alone(backend: str) -> None:
    integers = ("tokens", "position")

    def tensor(name: str) -> ark.Tensor:
        return ark.tensor(GIVEN[name].shape, ark.int32 if name in integers else ark.fp32)

    given: list[tuple[str, ark.Tensor]] = []

    def inputs(op: str) -> list[ark.Tensor]:
        tensors_by_name = [(name, tensor(name)) for name in OPS[op][0]]
        given.extend(tensors_by_name)
        return [t for _, t in tensors_by_name]

    key, position, keys = inputs("kv_append")
    rotated = ark.rope_kv(*inputs("rope_kv"))
    results = {
        "embed": [ark.embed(*inputs("embed"))],
        "rotary_embedding": [ark.rotary_embedding(*inputs("rotary_embedding"))],
        "kv_append": [ark.kv_append(keys, key, position)],
        "attention": [ark.attention(*inputs("attention"))],
        "rope_kv": list(rotated),
    }
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, tensors_by_name in given:
            tensors_by_name.from_numpy(GIVEN[name].astype(tensors_by_name.dtype().numpy))
        runtime.run()
        for op, tensors in results.items():
            wanted = alone(op)
            if op == "rope_kv":  # the second result is not compared
                del wanted[1]
            for got, want in zip(tensors, wanted, strict=True):
                np.testing.assert_allclose(got.to_numpy(), want, 2e-5, 2e-5, err_msg=op)


def test_flag_of_the_host_ends_a_launch(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch ends when the host sets a word in memory. Here that word is the memory of a token
    that the launch itself writes, so the launch ends itself. (The verifier, which would refuse this
    plan, is disabled.) A CPU reads the word after the tokens, so it runs no further iteration.
    """
    monkeypatch.setattr(work, "_check_aliases", lambda *_: None)
    posted, logits = 5, values(2, VOCABULARY, seed=8)
    logits[:, 7] = 9.0
    state = ark.TokenState.make(CONTEXT, 2, leaves=True)
    assert state.leave is not None
    state = dataclasses.replace(state, leave=state.output[posted : posted + 1])
    given = ark.tensor(logits.shape)
    ark.sample(given, state)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        given.from_numpy(logits)
        state.settings.from_numpy(np.array([0, 0, 0, 0, CONTEXT, 0, 0] * 2, np.int32))
        state.position.from_numpy(np.zeros(2, np.int32))
        state.tokens.from_numpy(np.zeros(2 * CONTEXT, np.int32))
        state.stops.from_numpy(np.full(MAX_STOPS, -1))
        state.output.from_numpy(np.zeros(2 * CONTEXT, np.int32))
        runtime.run(CONTEXT - 2)
        ended = state.position.to_numpy()
    late = posted + 1 if backend != "cpu" else posted
    assert (ended >= posted).all() and (ended <= late).all()
