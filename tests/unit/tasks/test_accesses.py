"""What a kind declares (`accesses`, `scratch`) against what its compiled body touches, on the CPU.

Planner, verifier and the brute-force oracle all believe the declaration, so none of them can find
it wrong. Here random ops of every kind are planned, compiled with a recorder in front of every
access to memory, and run task by task.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ark.ir.dtype import by_name, fp32
from ark.lower import tiling
from ark.lower.rewrite import overlap_collectives
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.tasks.adjusted import OPTIONS
from tests.projection import Projection, with_matrix
from tests.slow import slow
from tests.touch import READ, WRITTEN, Bench, Touched
from tests.unit.tasks.random_plans import (
    FAMILIES,
    SEEDS,
    Family,
    batch_plan,
    caches,
    channel_plan,
    custom_packets,
    decoder_plan,
    family_plan,
    long_products,
    movement,
    sum_plan,
    target,
)

# Kinds whose tasks may touch less than they declare; all others touch exactly that.
LARGER = {
    "adjust_logits": "a sequence within its prompt, or one that has ended, draws nothing",
    "advance": "it reads two of the settings",
    "argmax": "of a single column nothing need be read",
    "arrival": "what it declares to write peers have written when it runs",
    "attention": "the position says how much of the cache is in the past",
    "attention_tiles": "masks leave keys out, and the position says which",
    "choose": "one token is appended; only top-k looks at the logits again",
    "choose_each": "as choose; a sequence that has ended, or is within its prompt, draws nothing",
    "embedding": "the ids say which rows of the table",
    "expert_linear": "the experts say whose weights",
    "kv_append": "the position says which rows of the cache",
    "rope_kv": "the position says which rows of the cache, and drops those past its end",
    "paged_append": "the table and the position say which rows of the pool, and drop others",
    "paged_attention": "the table and the position say which rows of the pool",
    "gather": "the indices say which elements",
    "convolution": "strides leave out what lies between windows",
    "pool": "strides leave out what lies between windows",
    "remap": "steps leave elements out, and what is outside of the input is not read",
    "scatter": "the indices say which elements, and a plain update reads none",
    "scan": "an exclusive one does not need the last element",
    "sample_adjusted": "as adjust_logits; one token is counted, and the options say what is read",
    "sample": "it reads some of the settings, and no position without a temperature",
}


PLAIN = ("pointwise", "argmax", "gather", "scatter")  # kinds without a position


def may_be_larger(sig: kinds.Signature) -> bool:
    ends = {"linear": sig.params.get("epilogue"), "matmul": "rope_kv" * ("head_dim" in sig.params)}
    if sig.params.get("windows"):
        return True  # as a convolution's
    return (ends.get(sig.kind) or sig.kind) in LARGER


def masks(plan: Plan, op: int, accesses: list[kinds.Access]) -> dict[tuple[int, bool], np.ndarray]:
    """Declared bytes, as booleans, by (buffer, write)."""
    made: dict[tuple[int, bool], np.ndarray] = {}
    for access in accesses:
        tensor = plan.tensors[plan.ops[op].operands[access.operand]]
        size, items = tensor.itemsize, tensor.items
        each = 1 if tensor.packet else by_name(tensor.dtype).per_item
        whole = made.setdefault(
            (tensor.buffer, access.write), np.zeros(plan.buffers[tensor.buffer].nbytes, bool)
        )
        count = int(np.prod(items.extents)) * size
        lo, hi = list(access.lo), list(access.hi)
        lo[-1], hi[-1] = lo[-1] // each, -(-hi[-1] // each)
        box = tuple(slice(o + a, o + b) for o, a, b in zip(items.offsets, lo, hi, strict=True))
        whole[:count].reshape(*items.extents, size)[box] = True
    return made


def compare(plan: Plan, touched: Touched, position: int | None) -> tuple[int, int]:
    """Asserts that a task stayed within its declaration; (declared, touched) bytes of reads."""
    op = plan.ops[touched.task.op]
    kind, sig = kinds.get(op.kind), kinds.signature(plan, op)
    accesses = kind.accesses(sig, touched.task.coord)
    declared = masks(plan, op.id, accesses)
    what = f"{op.kind} {list(touched.task.coord)} of {sig}"
    assert touched.outside == 0, f"{touched.outside} bytes outside of every buffer: {what}"
    limit = kind.scratch(sig, machine_of(plan))
    assert not touched.scratch[limit:].any(), f"more scratch than {limit} bytes: {what}"
    sums = [0, 0]
    for buffer, marks in touched.marks.items():
        nothing = np.zeros(len(marks), bool)
        for write, bit in ((False, READ), (True, WRITTEN)):
            allowed = declared.get((buffer, write), nothing)
            did = (marks & bit) != 0
            extra = np.flatnonzero(did & ~allowed)
            verb = "writes" if write else "reads"
            assert not len(extra), (
                f"{verb} {len(extra)} undeclared bytes of buffer {buffer}: {what}"
            )
            if not may_be_larger(sig):
                less = np.count_nonzero(allowed & ~did)
                # What is read after it was written is one's own.
                less -= 0 if write else np.count_nonzero(allowed & ~did & ((marks & WRITTEN) != 0))
                assert not less, f"{less} declared bytes of {buffer} that it never {verb}: {what}"
            sums[0] += 0 if write else int(allowed.sum())
            sums[1] += 0 if write else int(did.sum())
    if position is not None:
        _check_past(plan, touched, accesses, position, what)
    return sums[0], sums[1]


def _check_past(
    plan: Plan, touched: Touched, accesses: list[kinds.Access], position: int, what: str
) -> None:
    """A past read takes rows before the position, a past write fills its own from there on."""
    for access in accesses:
        if not access.append_only:
            continue
        tensor = plan.tensors[plan.ops[touched.task.op].operands[access.operand]]
        bit = WRITTEN if access.write else READ
        marks = (touched.marks[tensor.buffer] & bit) != 0
        size = by_name(tensor.dtype).itemsize
        count = int(np.prod(tensor.extents)) * size
        rows = np.flatnonzero(marks[:count].reshape(*tensor.extents[:2], -1).any((0, 2)))
        first, last = access.appended
        mine = (rows >= position + first) & (rows < position + last)
        late = rows[~mine] if access.write else rows[rows >= position]
        verb = "appends" if access.write else "takes from the past"
        assert not len(late), f"{verb} rows {late.tolist()} at position {position}: {what}"


def _prepare(bench: Bench, op: int, rng: np.random.Generator) -> int | None:
    """Puts sense into an op's integers: returns the position if it has one."""
    entry = bench.plan.ops[op]
    shapes = [bench.plan.tensors[t].shape for t in entry.operands]
    kinds_of = [bench.plan.tensors[t].dtype for t in entry.operands]
    if entry.kind in ("gather", "scatter"):
        ids, data = (1, 0) if entry.kind == "gather" else (0, 2)
        bench.operand(op, ids)[...] %= shapes[data][entry.params["axis"]]
    if entry.kind in ("sample", "choose"):
        chosen = bench.operand(op, 1).reshape(-1, 7).T  # of each sequence
        chosen[0] = np.float32(rng.choice([0.0, 0.7])).view(np.int32)
        chosen[1] = rng.choice([0, 3])
        chosen[4] = rng.integers(1, 300)
        chosen[5] = rng.integers(0, shapes[6][0] + 1) if entry.kind == "choose" else 0
    if entry.kind == "choose_each":
        context = shapes[4][0] // shapes[2][0]
        settings = bench.operand(op, 1).reshape(-1, 7)
        settings[:, 0] = np.float32(rng.choice([0.0, 0.7])).view(np.int32)
        settings[:, 1] = rng.choice([0, 3])
        settings[:, 3:5] = rng.integers(-1, context, settings[:, 3:5].shape)
        settings[:, 5] = rng.integers(0, shapes[6][0] + 1)
        bench.operand(op, 2)[...] = rng.integers(0, context, shapes[2])
        return None
    if entry.kind in ("adjust_logits", "sample_adjusted"):
        context = shapes[4][0]
        bench.operand(op, 1).reshape(-1, len(OPTIONS))[...] = _options(rng)
        settings = bench.operand(op, 2).reshape(-1, 7).T  # of each sequence
        settings[0] = np.float32(rng.choice([0.0, 0.7])).view(np.int32)
        settings[3] = rng.integers(-1, context)
        settings[4] = rng.integers(-1, context)
        settings[5] = rng.integers(0, shapes[5][0] + 1)
        bench.operand(op, 3)[...] = rng.integers(0, context)
        return None
    if entry.kind in ("paged_append", "paged_attention") or entry.params.get("paged"):
        cache, table, at = (3, 1, 2) if entry.kind == "paged_append" else (1, 3, 4)
        table = 5 if entry.kind == "attention_tiles" else table
        for i, most in (table, shapes[cache][0]), (at, shapes[cache][2] * shapes[table][-1]):
            bench.operand(op, i)[...] = rng.integers(0, most, bench.operand(op, i).shape)
        return None
    caches = [s for s, d in zip(shapes, kinds_of, strict=True) if len(s) == 3]
    limit = caches[0][1] if caches else shapes[4][0] if entry.kind == "choose" else 4
    found = None
    for i, (shape, dtype) in enumerate(zip(shapes, kinds_of, strict=True)):
        if dtype == "int32" and shape == (1,) and entry.kind not in PLAIN:
            found = int(rng.choice([0, 1, limit // 2, limit - 2, limit - 1]))
            found = max(0, found)
            bench.operand(op, i)[...] = found  # of all sequences
    return found


def _options(rng: np.random.Generator) -> np.ndarray:
    """Any of the options of sampling, some of them off."""
    values = {
        "top_k": int(rng.choice([0, 3])),
        "top_p": float(rng.choice([1.0, 0.7])),
        "min_p": float(rng.choice([0.0, 0.1])),
        "typical_p": float(rng.choice([1.0, 0.8])),
        "repetition_penalty": 1.3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "min_tokens": int(rng.choice([0, 4])),
        "logprobs": int(rng.integers(0, 5)),
    }
    return np.array(
        [
            np.float32(v).view(np.int32) if isinstance(v, float) else v
            for v in (values[name] for name in OPTIONS)
        ],
        np.int32,
    )


def check(plan: Plan, seed: int = 0, runs: int = 1) -> dict[str, list[int]]:
    """Runs every task of a plan `runs` times; read bytes (declared, touched) by kind."""
    bench = Bench(plan, seed)
    rng = np.random.default_rng(seed)
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for number, task in enumerate(bench.tasks):
        kind = plan.ops[task.op].kind
        for _ in range(runs if may_be_larger(kinds.signature(plan, plan.ops[task.op])) else 1):
            position = _prepare(bench, task.op, rng)
            declared, did = compare(plan, bench.run(number), position)
            sums[kind][0] += declared
            sums[kind][1] += did
    return sums


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MIN_TILE", 7)
    monkeypatch.setattr(overlap_collectives, "PACKET_BYTES", 0)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__.strip("_"))
def test_public_ops_touch_what_they_declare(family: Family, seed: int) -> None:
    check(family_plan(family, seed), seed, runs=2)


@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_sums_over_ranks_touch_what_they_declare(seed: int) -> None:
    check(sum_plan(seed), seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_channels_touch_what_they_declare(seed: int) -> None:
    check(channel_plan(seed), seed)


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_decoders_touch_what_they_declare(seed: int) -> None:
    check(decoder_plan(seed), seed, runs=3)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_batches_touch_what_they_declare(seed: int) -> None:
    check(batch_plan(seed), seed, runs=8)


def test_packets_of_custom_ops_are_touched_as_declared() -> None:
    made = custom_packets()
    packed = {t.name for t in made.tensors if t.packet}
    assert packed == {"blur"}  # what shares reads may not come as packets
    check(made)


def test_long_products_of_few_rows_touch_what_they_declare() -> None:
    check(family_plan(long_products, 0, dtypes=[fp32], times=1))


def test_a_projection_touches_what_it_declares() -> None:
    what = Projection(rows=140, k=9, heads=2, kv_heads=1, width=64, context=300)
    check(what.plan(with_matrix(target(3))), runs=3)


def _of_every_kind() -> list[Plan]:
    plans = [family_plan(family, 0) for family in FAMILIES]
    plans += [sum_plan(seed) for seed in range(2)] + [decoder_plan(seed) for seed in range(4)]
    return [*plans, channel_plan(0), batch_plan(0)]


def test_every_kind_is_among_them() -> None:
    """A new kind needs a call above that makes tasks of it. Transfers touch nothing themselves: the
    host's proxy does; an iteration's end touches nothing at all. Claimed tiles are of kinds that
    are among them, and no machine of the CPU has any: tests/backend/test_claims.py runs them.
    """
    used = {op.kind for made in _of_every_kind() for op in made.ops}
    nothing = {"transfer", "iteration_end", "claimed"}
    assert used - nothing == set(kinds.names()) - nothing


def _half(access: kinds.Access) -> kinds.Access:
    """Half of it along its longest dimension."""
    sizes = [hi - lo for lo, hi in zip(access.lo, access.hi, strict=True)]
    d = sizes.index(max(sizes))
    hi = list(access.hi)
    hi[d] -= sizes[d] // 2
    return dataclasses.replace(access, hi=tuple(hi))


@slow
@pytest.mark.parametrize("write", [False, True], ids=["reads", "writes"])
def test_half_of_any_declaration_is_found(write: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind whose tasks touch more than one element so; what arrives, peers have written."""
    plans, missed = _of_every_kind(), set()
    names = {op.kind for made in plans for op in made.ops} - {"transfer", "iteration_end"}
    for name in names:
        kind, true, halved = kinds.get(name), kinds.get(name).accesses, []

        def half(
            sig: kinds.Signature, coord: Sequence[int], true: Any = true, halved: Any = halved
        ) -> list[kinds.Access]:
            found = true(sig, coord)
            made = [_half(a) if a.write == write else a for a in found]
            halved += [made != found]
            return made

        with monkeypatch.context() as patch:
            patch.setattr(kind, "accesses", half)
            try:
                for plan in (p for p in plans if any(op.kind == name for op in p.ops)):
                    for seed in range(3):
                        check(plan, seed, runs=6)
                if any(halved):
                    missed.add(name)
            except AssertionError as error:
                assert "undeclared bytes" in str(error)
    assert missed == ({"arrival"} if write else set())


def _smaller(access: kinds.Access) -> kinds.Access:
    return dataclasses.replace(access, hi=(*access.hi[:-1], max(1, access.hi[-1] - 1)))


@pytest.mark.parametrize("which", ["reads", "writes"])
def test_a_declaration_that_is_too_small_is_found(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family_plan(movement, 0)
    kind, true = kinds.get("transpose"), kinds.get("transpose").accesses

    def less(sig: kinds.Signature, coord: Sequence[int]) -> list[kinds.Access]:
        found = true(sig, coord)
        return [_smaller(a) if a.write == (which == "writes") else a for a in found]

    monkeypatch.setattr(kind, "accesses", less)
    with pytest.raises(AssertionError, match=f"{which} .* undeclared bytes .* transpose"):
        check(made)


def test_declarations_that_are_too_large_or_in_the_future_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = family_plan(caches, 0)
    kind, true = kinds.get("attention"), kinds.get("attention").accesses

    def past(sig: kinds.Signature, coord: Sequence[int]) -> list[kinds.Access]:
        return [dataclasses.replace(a, append_only=a.operand in (1, 2)) for a in true(sig, coord)]

    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="from the past"):
        patch.setattr(kind, "accesses", past)
        check(made)
    monkeypatch.delitem(LARGER, "kv_append")
    with pytest.raises(
        AssertionError, match=r"declared bytes of .* it never (reads|writes): kv_append"
    ):
        check(made)
    # Only the comparison believes in 8 bytes; the body has all that it needs.
    needed = kind.scratch
    monkeypatch.setattr(sys.modules[__name__], "machine_of", lambda plan: None)
    monkeypatch.setattr(
        kind, "scratch", lambda sig, machine: needed(sig, machine) if machine else 8
    )
    monkeypatch.setitem(LARGER, "kv_append", "")
    with pytest.raises(AssertionError, match="more scratch than 8 bytes"):
        check(made)
