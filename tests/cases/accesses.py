"""Cases and helpers of tests/unit/tasks/test_accesses.py, which other tests use too."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from ark_cpu.dialect import dialect

from ark.backend.codegen.bodies import body_scratch
from ark.ir.dtype import by_name
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.tasks.adjusted import OPTIONS
from tests.touch import READ, WRITTEN, Bench, Touched

# Kinds whose tasks may access fewer bytes than they declare, each with the reason. Tasks of all
# other kinds access exactly the declared bytes.
LARGER = {
    "adjust_logits": "a sequence within its prompt, or one that has ended, draws nothing",
    "advance": "it reads two of the settings",
    "argmax": "of a single column nothing need be read",
    "arrival": "what it declares to write peers have written when it runs",
    "attention": "the position says how much of the cache is in the past",
    "attention_gradient": "a causal mask leaves out scores, whose mask is not read",
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
    "depthwise": "strides leave out what lies between windows",
    "grouped_convolution": "strides leave out what lies between windows",
    "pool": "strides leave out what lies between windows",
    "unpool": "strides leave out what lies between windows",
    "remap": "steps leave elements out, and what is outside of the input is not read",
    "scatter": "the indices say which elements, and a plain update reads none",
    "scan": "an exclusive one does not need the last element",
    "sample": "it reads some of the settings, and no position without a temperature",
    "sample_adjusted": "as adjust_logits; one token is counted, and the options say what is read",
}
PLAIN = ("elementwise", "argmax", "gather", "scatter")  # kinds without a position


def may_be_larger(sig: kinds.Signature) -> bool:
    ends = {"linear": sig.params.get("epilogue"), "matmul": "rope_kv" * ("head_dim" in sig.params)}
    if sig.params.get("windows"):
        return True  # windows may skip elements, as in a convolution
    return (ends.get(sig.kind) or sig.kind) in LARGER


def masks(plan: Plan, op: int, accesses: list[kinds.Access]) -> dict[tuple[int, bool], np.ndarray]:
    """Returns, by (buffer, write), a boolean array that is True at each declared byte."""
    results: dict[tuple[int, bool], np.ndarray] = {}
    for access in accesses:
        tensor = plan.tensors[plan.ops[op].operands[access.operand]]
        size, items = tensor.itemsize, tensor.items
        each = 1 if tensor.packet else by_name(tensor.dtype).per_item
        whole = results.setdefault(
            (tensor.buffer, access.write), np.zeros(plan.buffers[tensor.buffer].nbytes, bool)
        )
        count = int(np.prod(items.extents)) * size
        lo, hi = list(access.lo), list(access.hi)
        lo[-1], hi[-1] = lo[-1] // each, -(-hi[-1] // each)
        box = tuple(slice(o + a, o + b) for o, a, b in zip(items.offsets, lo, hi, strict=True))
        whole[:count].reshape(*items.extents, size)[box] = True
    return results


def compare(plan: Plan, touched: Touched, position: int | None) -> tuple[int, int]:
    """Asserts that a task touched only declared bytes, and all of them unless its kind is in
    LARGER. Returns the declared and the touched number of bytes read.
    """
    op = plan.ops[touched.task.op]
    kind, sig = kinds.get(op.kind), kinds.signature(plan, op)
    accesses = kind.accesses(sig, touched.task.coord)
    declared = masks(plan, op.id, accesses)
    task_name = f"{op.kind} {list(touched.task.coord)} of {sig}"
    assert touched.outside == 0, f"{touched.outside} bytes outside of every buffer: {task_name}"
    limit = body_scratch(sig, machine_of(plan), dialect())
    assert not touched.scratch[limit:].any(), f"more scratch than {limit} bytes: {task_name}"
    sums = [0, 0]
    for buffer, marks in touched.marks.items():
        nothing = np.zeros(len(marks), bool)
        for write, bit in ((False, READ), (True, WRITTEN)):
            allowed = declared.get((buffer, write), nothing)
            did = (marks & bit) != 0
            extra = np.flatnonzero(did & ~allowed)
            verb = "writes" if write else "reads"
            assert not len(extra), (
                f"{verb} {len(extra)} undeclared bytes of buffer {buffer}: {task_name}"
            )
            if not may_be_larger(sig):
                less = np.count_nonzero(allowed & ~did)
                # A read of bytes that the same task wrote before need not be declared.
                less -= 0 if write else np.count_nonzero(allowed & ~did & ((marks & WRITTEN) != 0))
                assert not less, (
                    f"{less} declared bytes of {buffer} that it never {verb}: {task_name}"
                )
            sums[0] += 0 if write else int(allowed.sum())
            sums[1] += 0 if write else int(did.sum())
    if position is not None:
        _check_past(plan, touched, accesses, position, task_name)
    return sums[0], sums[1]


def _check_past(
    plan: Plan, touched: Touched, accesses: list[kinds.Access], position: int, task_name: str
) -> None:
    """Asserts that an append-only operand is read only at rows before the position, and written
    only at the appended rows.
    """
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
        assert not len(late), f"{verb} rows {late.tolist()} at position {position}: {task_name}"


def _prepare(bench: Bench, op: int, rng: np.random.Generator) -> int | None:
    """Fills an op's integer operands with valid values. Returns the position if the op has one."""
    entry = bench.plan.ops[op]
    shapes = [bench.plan.tensors[t].shape for t in entry.operands]
    kinds_of = [bench.plan.tensors[t].dtype for t in entry.operands]
    if entry.kind in ("gather", "scatter"):
        ids, data = (1, 0) if entry.kind == "gather" else (0, 2)
        bench.operand(op, ids)[...] %= shapes[data][entry.params["axis"]]
    if entry.kind in ("sample", "choose"):
        chosen = bench.operand(op, 1).reshape(-1, 7).T  # settings by sequence
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
        settings = bench.operand(op, 2).reshape(-1, 7).T  # settings by sequence
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
    actual = None
    for i, (shape, dtype) in enumerate(zip(shapes, kinds_of, strict=True)):
        if dtype == "int32" and shape == (1,) and entry.kind not in PLAIN:
            actual = int(rng.choice([0, 1, limit // 2, limit - 2, limit - 1]))
            actual = max(0, actual)
            bench.operand(op, i)[...] = actual  # the same position for all sequences
    return actual


def _options(rng: np.random.Generator) -> np.ndarray:
    """Returns random sampling options; some of them are off."""
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
        "masked": 1,
    }
    return np.array(
        [
            np.float32(v).view(np.int32) if isinstance(v, float) else v
            for v in (values[name] for name in OPTIONS)
        ],
        np.int32,
    )


def check(plan: Plan, seed: int = 0, runs: int = 1) -> dict[str, list[int]]:
    """Runs every task of a plan, `runs` times if it may touch less than it declares. Returns, by
    kind, the declared and the touched number of bytes read.
    """
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
