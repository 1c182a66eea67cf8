"""Makes, verifies and caches the plans of a decoder, and reads a model's properties from a plan.

Called by ark.models.generate, the benchmarks and the commands that plan, export or draw a model.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ark import log
from ark.errors import InvalidUsageError, PlanError
from ark.ir.digest import digest as graph_digest
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.ir.values import whole
from ark.lower import registry as ops
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import FULL, Shape, build
from ark.models.checkpoint import Checkpoint
from ark.plan import kind as kinds
from ark.plan.rotated import Rotated, mark_verified
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import cache, tuned, tuned_collectives
from ark.tasks.adjusted import SampleAdjustedParams
from ark.tasks.advance import AdvanceParams

Drafted = Callable[[int, Plan], None]


def plans(
    shape: Shape,
    machine: Machine,
    options: dict[str, Any] | None = None,
    drafted: Drafted | None = None,
) -> Sequence[Plan]:
    """Verified plans of all ranks of a model; `shape.rank` is ignored. drafted: see
    ark.lower.ranks.plan_ranks; it is not called for cached plans. Without the option `engines`, the
    collectives use the engines that were measured as fastest on this machine. All ranks must have
    agreed on these measurements before.

    Verified plans are cached. The key is a hash of the traced graphs, the machine, the options and
    all planning source (`_key`). If ARK_DEBUG requests planning decisions, plans are made again,
    because a cached plan has no decisions to print.
    """
    if shape.world_size == 1:
        options = {**tuned.options(machine), **(options or {})}
    elif "engines" not in (options or {}):
        options = {**tuned_collectives.options(machine, shape.world_size), **(options or {})}
    graphs = traced(shape)
    name = _key(shape, graphs, machine, options)
    asked = any(log.shows(stage) for stage in ("passes", "lower", "plan"))
    data = None if asked else cache.load(cache.PLANS, name)
    if data is not None:
        try:
            cached = _from_texts(data.decode().split("\0"))
            # Plans in the cache were verified before they were stored, and the cache refuses
            # entries of other users. So they are not verified again.
            mark_verified(cached)
            log.debug(f"the plans for {machine.name} are in the cache")
            return cached
        # The cache entry does not have the format that `_texts` writes. It is removed, and the
        # plans are made again.
        except (PlanError, ValueError, TypeError, IndexError):
            cache.drop(cache.PLANS, name)
    new_plans = make_plans(shape, machine, options, drafted, graphs)
    cache.store(cache.PLANS, name, "\0".join(_texts(new_plans)).encode())
    return new_plans


def make_plans(
    shape: Shape,
    machine: Machine,
    options: dict[str, Any] | None = None,
    drafted: Drafted | None = None,
    graphs: Sequence[Graph] | None = None,
) -> Sequence[Plan]:
    """Makes and verifies plans as `plans` does, but without the cache. graphs: the result of
    `traced`, if it is available.
    """
    if graphs is None or shape.split:
        graphs = [build(replace(shape, rank=rank)).graph for rank in range(shape.world_size)]
    # The option `lockstep` makes all ranks begin an iteration at the same time. The ranks of a
    # decoder synchronise in every layer anyway, and one barrier is faster than a separate wait for
    # each peer.
    chosen = {"lockstep": True, **(options or {})}
    with log.timed(f"planned {len(graphs)} rank(s) for {machine.name}"):
        rank_plans = plan_ranks(graphs, machine, chosen, _meta(shape), drafted)
    verify(rank_plans)
    return rank_plans


def traced(shape: Shape) -> list[Graph]:
    """The graphs from which plans are made: one graph per rank, or a single-device graph if a named
    plan splits it.
    """
    if shape.split:
        return [build(replace(shape, rank=0, world_size=1, split="")).graph]
    return [build(replace(shape, rank=rank)).graph for rank in range(shape.world_size)]


def _key(
    shape: Shape, graphs: Sequence[Graph], machine: Machine, options: dict[str, Any] | None
) -> str:
    """The name of the plans in the cache. It depends on the graphs, on what `make_plans` adds, and
    on the source of ark and of all registered ops and task kinds.
    """
    more = (shape.world_size, shape.split, _meta(shape), machine, options)
    added = cache.sources_digest(_outside())
    return cache.key(cache.code_digest(), added, repr(more), *map(graph_digest, graphs))


def _outside() -> list[str]:
    """The source files on which plans depend besides ark's own: those of the lowerings of
    registered ops, and of registered task kinds.
    """
    makers: list[Any] = [ops.get(name).lower for name in ops.names()]
    makers += [type(kinds.get(name)) for name in kinds.names()]
    modules = {sys.modules.get(maker.__module__) for maker in makers}
    files = (getattr(module, "__file__", None) for module in modules)
    return [file for file in files if file]


def _meta(shape: Shape) -> dict[str, Any]:
    """The model's properties that a plan stores in its `meta`, such as the context and the
    chunk.
    """
    meta = {"model": shape.config.architecture, "context": shape.context, "chunk": shape.chunk}
    if shape.pages is not None:
        meta |= {"pages": shape.pages.pool, "page": shape.pages.size}
    meta |= {"batch": shape.batch} if shape.batch > 1 else {}
    return meta | ({"sampling": shape.sampling} if shape.sampling else {})


def _texts(rank_plans: Sequence[Plan]) -> list[str]:
    """The plans as JSON. If the plans of all ranks differ only in rank numbers and in the offsets
    of some tensors, there are two texts: the first rank's plan, and the steps by which the offsets
    grow from rank to rank.
    """
    if isinstance(rank_plans, Rotated):
        return [to_json(rank_plans.first), json.dumps(sorted(rank_plans.moved.items()))]
    return ["", *(to_json(plan) for plan in rank_plans)]


def _from_texts(texts: Sequence[str]) -> Sequence[Plan]:
    """The plans that `_texts` wrote."""
    first, *others = texts
    if not first:
        return [from_json(text) for text in others]
    moved = {tensor: tuple(steps) for tensor, steps in json.loads(others[0])}
    return Rotated(from_json(first), moved)


def digest(rank_plans: Sequence[Plan]) -> str:
    """A hash of plans. Equal plans have equal hashes."""
    return hashlib.sha256("".join(_texts(rank_plans)).encode()).hexdigest()[:16]


def choose_context(checkpoint: Checkpoint, wanted: int | None) -> int:
    """The number of positions to reserve: `wanted`, or by default the model's maximum."""
    limit = checkpoint.config.max_position_embeddings
    if wanted is None:
        return min(limit, 4096)
    if not 1 <= whole("the context", wanted) <= limit:
        raise InvalidUsageError(
            f"a context of {wanted} positions is out of range; the checkpoint allows 1 to "
            f"{limit} (max_position_embeddings)"
        )
    return int(wanted)


def usual_chunk(machine: Machine, dtype: DataType) -> int:
    """The default number of prompt tokens per iteration. It is larger on machines with matrix
    units.

    dtype: the type of the weights. With warpgroups, a tile of a matmul has 128 rows, and the
    default is four rows of tiles, which give all processors of a GPU work. With split-K, one row of
    tiles would suffice for the matmuls, but attention on matrix units is faster with more rows.
    """
    if dtype.name in ("bf16", "fp16"):
        if machine.has(Capability.WGMMA):
            return 512
        if machine.has(Capability.K_PARTS):
            return 512 if machine.has(Capability.ATTENTION_UNITS) else 128
    return 64 if machine.has(Capability.MMA_SYNC) else 16


def choose_chunk(wanted: int | None, context: int, usual: int) -> int:
    """The number of prompt tokens per iteration: `wanted`, or by default `usual`, but at most the
    context. If `wanted` is reduced, a warning is logged.
    """
    if wanted is None:
        return min(usual, context)
    chunk = whole("the chunk", wanted)
    if chunk < 0:
        raise InvalidUsageError(
            f"chunk={chunk} is not valid; it must be 0 (no prompt phase) or more"
        )
    if chunk > context:
        log.warn(
            f"chunk={chunk} exceeds the context of {context} positions; it is reduced to {context}"
        )
    return min(chunk, context)


def plan_context(plan: Plan) -> int:
    """The largest number of positions of a sequence in a decoder's plan."""
    tokens = next((t.shape[0] for t in plan.tensors if t.name == "tokens"), 0)
    return tokens // plan_batch(plan)


def plan_batch(plan: Plan) -> int:
    """The number of sequences that a decoder's plan decodes in one iteration."""
    return next((t.shape[0] for t in plan.tensors if t.name == "position"), 1)


def plan_sampling(plan: Plan) -> tuple[str, int]:
    """The fields `sampling` and `logprobs` of ark.models.build.Shape in a decoder's plan."""
    adjusted = (op for op in plan.ops if op.kind == "sample_adjusted")
    tops = [SampleAdjustedParams.from_plan(op.params).top for op in adjusted]
    return (FULL, tops[0]) if tops else ("", 0)


def plan_chunk(plan: Plan) -> int:
    """The prompt tokens per iteration of a decoder's plan; 0 if it has no prompt phase."""
    chunks = {AdvanceParams.from_plan(op.params).rows for op in plan.ops if op.kind == "advance"}
    recorded = plan.meta.get("chunk")
    if len(chunks) > 1 or chunks != ({recorded} if recorded else set()):
        raise InvalidUsageError(
            f"the plan says that it reads {recorded} prompt tokens per iteration, but its tasks "
            f"advance by {sorted(chunks) or 'none'}; plan again with `ark plan DIR --chunk N`"
        )
    return chunks.pop() if chunks else 0
