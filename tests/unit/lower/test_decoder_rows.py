"""Attention of one row of a decoder: windows are divided among tasks where a warp leads, and
queries, keys and values with norms of single heads come from one product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ark.backend import registry
from ark.ir.dtype import bf16
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.plans import make_plans
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from tests.cases.decoders import CASES
from tests.checkpoints import make_checkpoint

CONTEXT_POSITIONS = 640


def planned(folder: Path, machine: str, **config: Any) -> Plan:
    checkpoint = Checkpoint.open(make_checkpoint(folder, dtype="bfloat16", **config))
    shape = Shape(checkpoint.config, bf16, CONTEXT_POSITIONS, 0)
    return make_plans(shape, registry.machine(machine))[0]


@pytest.mark.parametrize(("machine", "divided"), [("h200", True), ("mi300x", False)])
def test_window_of_one_row_is_divided_where_a_warp_leads(
    machine: str, divided: bool, tmp_path: Path
) -> None:
    windows = {**CASES["gpt-oss"], "sliding_window": 256, "head_dim": 64}
    plan = planned(tmp_path, machine, **windows)
    kinds = [op.kind for op in plan.ops]
    own = [op.params for op in plan.ops if op.kind == "attention" and op.params.get("window")]
    assert [p["window"] for p in own] == ([256, 256] if divided else [])
    assert ("attention_tiles" in kinds) != divided
    assert all(p["splits"] > 1 for p in own)  # only the task that merges parts adds sinks
    tasks = (t for processor in plan.phases[-1].processors for t in processor)
    windows_read = {f.growth.window for t in tasks for f in t.fetches if f.growth}
    assert windows_read == ({0, 256} if divided else {0})  # one layer sees all positions
    assert from_json(to_json(plan)) == plan


def test_projections_with_norms_of_heads_are_one_product(tmp_path: Path) -> None:
    plan = planned(tmp_path, "h200", kind="qwen3")
    rotated = [op for op in plan.ops if op.kind == "rope_kv"]
    assert len(rotated) == 2 and all(op.params["head_eps"] > 0 for op in rotated)
    kinds = {op.kind for op in plan.ops}
    assert not kinds & {"rotary_embedding", "kv_append", "row_norm"}
