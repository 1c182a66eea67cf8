"""A decoder's plans: made from its shape, verified, kept on disk; and what a plan says of itself.

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
from ark.capability import Capability
from ark.errors import InvalidUsageError, PlanError
from ark.ir.digest import digest as graph_digest
from ark.ir.dtype import DataType
from ark.ir.graph import Graph
from ark.ir.values import whole
from ark.lower import registry as ops
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.models.build import FULL, Shape, build
from ark.models.checkpoint import Checkpoint
from ark.plan import kind as kinds
from ark.plan.rotated import Rotated, mark_verified
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime import cache, tuned, tuned_collectives

Drafted = Callable[[int, Plan], None]


def plans(
    shape: Shape,
    machine: Machine,
    options: dict[str, Any] | None = None,
    drafted: Drafted | None = None,
) -> Sequence[Plan]:
    """Verified plans of all ranks of a model; `shape.rank` is ignored. drafted: as for
    ark.lower.ranks.plan_ranks, if they are made anew. Without the option `engines` it is what was
    measured on this machine; ranks that run the plans agree on theirs before.

    Plans that were verified once come from the cache, by the hash of what was traced, the machine,
    the options and the source of all that plans (`_key`).
    """
    if shape.world_size == 1:
        options = {**tuned.options(machine), **(options or {})}
    elif "engines" not in (options or {}):
        options = {**tuned_collectives.options(machine, shape.world_size), **(options or {})}
    graphs = traced(shape)
    name = _key(shape, graphs, machine, options)
    data = cache.load(cache.PLANS, name)
    if data is not None:
        try:
            cached = _from_texts(data.decode().split("\0"))
            mark_verified(cached)  # before they were stored, and the cache's entries are signed
            log.debug(f"the plans for {machine.name} are in the cache")
            return cached
        except (PlanError, ValueError, TypeError, IndexError):  # not as _texts writes them
            cache.drop(cache.PLANS, name)
    made = make_plans(shape, machine, options, drafted, graphs)
    cache.store(cache.PLANS, name, "\0".join(_texts(made)).encode())
    return made


def make_plans(
    shape: Shape,
    machine: Machine,
    options: dict[str, Any] | None = None,
    drafted: Drafted | None = None,
    graphs: Sequence[Graph] | None = None,
) -> Sequence[Plan]:
    """What `plans` gives, planned and verified anew. graphs: those of `traced`, if there are."""
    if graphs is None or shape.split:
        graphs = [build(replace(shape, rank=rank)).graph for rank in range(shape.world_size)]
    # Shards of a decoder meet in every layer: one barrier costs less than waits for each peer.
    chosen = {"together": True, **(options or {})}
    with log.timed(f"planned {len(graphs)} rank(s) for {machine.name}"):
        made = plan_ranks(graphs, machine, chosen, _meta(shape), drafted)
    verify(made)
    return made


def traced(shape: Shape) -> list[Graph]:
    """What plans are made from: the graph of each rank, or the one of a single device where a named
    plan splits it.
    """
    if shape.split:
        return [build(replace(shape, rank=0, world_size=1, split="")).graph]
    return [build(replace(shape, rank=rank)).graph for rank in range(shape.world_size)]


def _key(
    shape: Shape, graphs: Sequence[Graph], machine: Machine, options: dict[str, Any] | None
) -> str:
    """The plans' name in the cache: the graphs themselves, what `make_plans` adds to them, and the
    source of ark and of every op and task kind that others have added.
    """
    more = (shape.world_size, shape.split, _meta(shape), machine, options)
    added = cache.sources_digest(_outside())
    return cache.key(cache.code_digest(), added, repr(more), *map(graph_digest, graphs))


def _outside() -> list[str]:
    """Files of registered ops' lowerings and of task kinds."""
    makers: list[Any] = [ops.get(name).lower for name in ops.names()]
    makers += [type(kinds.get(name)) for name in kinds.names()]
    modules = {sys.modules.get(maker.__module__) for maker in makers}
    files = (getattr(module, "__file__", None) for module in modules)
    return [file for file in files if file]


def _meta(shape: Shape) -> dict[str, Any]:
    """What a plan says of its model."""
    meta = {"model": shape.config.architecture, "context": shape.context, "chunk": shape.chunk}
    if shape.pages is not None:
        meta |= {"pages": shape.pages.pool, "page": shape.pages.size}
    meta |= {"batch": shape.batch} if shape.batch > 1 else {}
    return meta | ({"sampling": shape.sampling} if shape.sampling else {})


def _texts(made: Sequence[Plan]) -> list[str]:
    """The plans as JSON; where one stands for all, that one and what moves from rank to rank."""
    if isinstance(made, Rotated):
        return [to_json(made.first), json.dumps(sorted(made.moved.items()))]
    return ["", *(to_json(plan) for plan in made)]


def _from_texts(texts: Sequence[str]) -> Sequence[Plan]:
    """The plans that `_texts` wrote."""
    first, *others = texts
    if not first:
        return [from_json(text) for text in others]
    moved = {tensor: tuple(steps) for tensor, steps in json.loads(others[0])}
    return Rotated(from_json(first), moved)


def digest(made: Sequence[Plan]) -> str:
    """A hash of plans; equal plans have equal hashes."""
    return hashlib.sha256("".join(_texts(made)).encode()).hexdigest()[:16]


def choose_context(checkpoint: Checkpoint, wanted: int | None) -> int:
    """Positions to reserve: as asked, at most what the model was made for."""
    limit = checkpoint.config.max_position_embeddings
    if wanted is None:
        return min(limit, 4096)
    if not 1 <= whole("the context", wanted) <= limit:
        raise InvalidUsageError(
            f"a context of {wanted} positions was asked for; the checkpoint allows 1 to {limit} "
            "(max_position_embeddings)"
        )
    return int(wanted)


def usual_chunk(machine: Machine, dtype: DataType) -> int:
    """Prompt tokens an iteration where nobody says how many: more where they fill matrix units.

    dtype: of the weights. Warpgroups take tiles of 128 rows, and four of them busy a GPU; where
    k is cut into parts, one does, but attention on matrix units is worth more rows.
    """
    if dtype.name in ("bf16", "fp16"):
        if machine.has(Capability.WGMMA):
            return 512
        if machine.has(Capability.K_PARTS):
            return 512 if machine.has(Capability.ATTENTION_UNITS) else 128
    return 64 if machine.has(Capability.MMA_SYNC) else 16


def choose_chunk(wanted: int | None, context: int, usual: int) -> int:
    """Prompt tokens an iteration: as asked, else the usual number; at most the context, which is
    said where more were asked for.
    """
    if wanted is None:
        return min(usual, context)
    chunk = whole("the chunk", wanted)
    if chunk < 0:
        raise InvalidUsageError(f"the chunk is {chunk}; it must be 0 (no prompt phase) or more")
    if chunk > context:
        log.warn(
            f"a chunk of {chunk} prompt tokens is more than the context of {context} positions; "
            f"it is {context} now"
        )
    return min(chunk, context)


def plan_context(plan: Plan) -> int:
    """The positions that a decoder's plan was made for."""
    tokens = next((t.shape[0] for t in plan.tensors if t.name == "tokens"), 0)
    return tokens // plan_batch(plan)


def plan_batch(plan: Plan) -> int:
    """The sequences that a decoder's plan decodes together."""
    return next((t.shape[0] for t in plan.tensors if t.name == "position"), 1)


def plan_sampling(plan: Plan) -> tuple[str, int]:
    """A decoder's `sampling` and `logprobs`, as of ark.models.build.Shape."""
    tops = [int(op.params["top"]) for op in plan.ops if op.kind == "sample_adjusted"]
    return (FULL, tops[0]) if tops else ("", 0)


def plan_chunk(plan: Plan) -> int:
    """The prompt tokens that a decoder's plan takes an iteration; 0 if it has no prompt phase."""
    chunks = {int(op.params["rows"]) for op in plan.ops if op.kind == "advance"}
    said = plan.meta.get("chunk")
    if len(chunks) > 1 or chunks != ({said} if said else set()):
        raise InvalidUsageError(
            f"the plan says that it takes {said} prompt tokens an iteration, but its tasks advance "
            f"by {sorted(chunks) or 'none'}; make it again with `ark plan DIR --chunk N`"
        )
    return chunks.pop() if chunks else 0
