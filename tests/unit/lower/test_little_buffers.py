"""Small activations do not share memory, so that an op does not wait for readers of another's."""

from __future__ import annotations

import itertools

import ark
from ark.backend import registry
from ark.lower.pipeline import plan
from ark.plan.memory import MAX_LITTLE_BYTES


def test_parts_of_two_reductions_have_memory_of_their_own() -> None:
    """The second reduction begins while one processor still combines the parts of the first."""
    with ark.use_model(ark.Model()) as model:
        x = ark.exp(ark.tensor([200000, 64]))
        ark.reduce_max(x, 0)
        ark.reduce_min(x, 0)
    planned = plan(model.graph, registry.machine("h200"))
    little = [
        b for b in planned.buffers if b.arena == "activation" and b.nbytes <= MAX_LITTLE_BYTES
    ]
    places = sorted((b.offset, b.offset + b.nbytes) for b in little)
    assert len(places) >= 4
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def test_activations_that_are_small_in_total_share_memory() -> None:
    with ark.use_model(ark.Model()) as model:
        x = ark.tensor([64, 128])
        for _ in range(32):
            x = ark.softmax(x)
    planned = plan(model.graph, registry.machine("h200"))
    assert planned.arenas["activation"] <= 4 * 64 * 128 * 4
