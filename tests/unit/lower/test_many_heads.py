"""Decoders whose key/value heads serve many query heads have a plan on every kind of machine."""

from __future__ import annotations

import dataclasses

import pytest

from ark.backend import registry
from ark.ir.dtype import bf16
from ark.models.build import Pages, Shape
from ark.models.config import builtin_config
from ark.models.plans import plans
from ark.plan.serialize import machine_of
from ark.tasks.attention import in_place_bytes

MACHINES = ("a100", "h200", "rtx5090", "mi300x", "rx7900xtx")


def shape(group: int, width: int, paged: bool, batch: int = 1) -> Shape:
    """A decoder of one layer with two key/value heads of `width` elements."""
    config = dataclasses.replace(
        builtin_config("llama-3.2-1b"),
        num_hidden_layers=1,
        hidden_size=1024,
        intermediate_size=1024,
        vocab_size=1024,
        bos_token_id=1,
        eos_token_ids=(2,),
        num_attention_heads=2 * group,
        num_key_value_heads=2,
        head_dim=width,
    )
    if paged:
        return Shape(config, bf16, 544, 64, pages=Pages(64, 32, (1,)))
    return Shape(config, bf16, 544, 0, batch=batch)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("group", "width"), [(8, 128), (12, 128), (16, 128), (16, 256)])
def test_many_query_heads_have_a_plan(name: str, group: int, width: int) -> None:
    """Qwen3-30B-A3B has 8 query heads of 128 elements per key/value head, GLM-4 has 16. `plans`
    verifies that every task fits in shared memory.
    """
    machine = registry.machine(name)
    assert plans(shape(group, width, paged=True), machine)
    assert plans(shape(group, width, paged=False), machine)


def test_variant_whose_ring_leaves_too_little_is_not_chosen() -> None:
    """Attention of 8 heads of 128 elements fits beside the ring of 12 stages, not of 13. Attention
    of 16 such heads fits beside neither, so it does not count.
    """
    machine = registry.machine("h200")
    stages = {}
    for group in (1, 8, 16):
        (plan,) = plans(shape(group, 128, paged=False), machine)
        stages[group] = machine_of(plan).variant.stages
        kinds = {op.kind for op in plan.ops}
        assert ("attention_tiles" in kinds) == (group == 16)
    assert stages == {1: 13, 8: 12, 16: 13}
    assert in_place_bytes(8, 128) <= machine.task_bytes < in_place_bytes(16, 128)


def test_several_sequences_have_a_plan() -> None:
    """The caches of all sequences are one tensor; only one sequence's heads share memory."""
    for group, width in ((12, 128), (8, 256)):
        assert plans(shape(group, width, paged=False, batch=4), registry.machine("h200"))
