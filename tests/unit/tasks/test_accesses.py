"""What a kind declares (`accesses`, `scratch`) against what its compiled body touches, on the CPU.

Planner, verifier and the brute-force oracle all believe the declaration, so none of them can find
it wrong. Here random ops of every kind are planned, compiled with a recorder in front of every
access to memory, and run task by task.
"""

from __future__ import annotations

import dataclasses
import os
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from ark_cpu import machines

import ark
from ark.frontend.model import Model, use_model
from ark.ir.dtype import FLOATS, DataType, by_name, int4, int32, int64
from ark.lower import tiling
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.generate import make_plans
from ark.plan import kind as kinds
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests.touch import READ, WRITTEN, Bench, Touched

# Kinds whose tasks may touch less than they declare; all others touch exactly that.
LARGER = {
    "advance": "it reads two of the settings",
    "argmax": "of a single column nothing need be read",
    "attention": "the position says how much of the cache is in the past",
    "attention_tiles": "masks leave keys out, and the position says which",
    "choose": "one token is appended; only top-k looks at the logits again",
    "choose_each": "as choose; a sequence that has ended, or is within its prompt, draws nothing",
    "embedding": "the ids say which rows of the table",
    "expert_linear": "the experts say whose weights",
    "kv_append": "the position says which rows of the cache",
    "rope_kv": "the position says which rows of the cache, and drops those past its end",
    "gather": "the indices say which elements",
    "pool": "strides leave out what lies between windows",
    "remap": "steps leave elements out, and what is outside of the input is not read",
    "scatter": "the indices say which elements, and a plain update reads none",
    "scan": "an exclusive one does not need the last element",
    "sample": "it reads some of the settings, and no position without a temperature",
}


PLAIN = ("pointwise", "argmax", "gather", "scatter")  # kinds without a position


def may_be_larger(sig: kinds.Signature) -> bool:
    return (sig.params["epilogue"] if sig.kind == "linear" else sig.kind) in LARGER


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
    """A past read takes rows before the position, a past write fills rows from it on."""
    for access in accesses:
        if not access.append_only:
            continue
        tensor = plan.tensors[plan.ops[touched.task.op].operands[access.operand]]
        bit = WRITTEN if access.write else READ
        marks = (touched.marks[tensor.buffer] & bit) != 0
        size = by_name(tensor.dtype).itemsize
        count = int(np.prod(tensor.extents)) * size
        rows = np.flatnonzero(marks[:count].reshape(*tensor.extents[:2], -1).any((0, 2)))
        late = rows[rows < position] if access.write else rows[rows >= position]
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
        chosen = bench.operand(op, 1).reshape(-1, 6).T  # of each sequence
        chosen[0] = np.float32(rng.choice([0.0, 0.7])).view(np.int32)
        chosen[1] = rng.choice([0, 3])
        chosen[4] = rng.integers(1, 300)
        chosen[5] = rng.integers(0, shapes[6][0] + 1) if entry.kind == "choose" else 0
    if entry.kind == "choose_each":
        context = shapes[4][0] // shapes[2][0]
        settings = bench.operand(op, 1).reshape(-1, 6)
        settings[:, 0] = np.float32(rng.choice([0.0, 0.7])).view(np.int32)
        settings[:, 1] = rng.choice([0, 3])
        settings[:, 3:5] = rng.integers(-1, context, settings[:, 3:5].shape)
        settings[:, 5] = rng.integers(0, shapes[6][0] + 1)
        bench.operand(op, 2)[...] = rng.integers(0, context, shapes[2])
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


def target(processors: int, packets: bool = False) -> Machine:
    made = machines.model(processors)
    words = (*made.capabilities, "packets") if packets else made.capabilities
    return dataclasses.replace(made, tile=(5, 6), capabilities=words)


class Draw:
    """Random operands: tensors, some of them boxes of larger ones."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.int = self.random.randint
        self.one = self.random.choice

    def shape(self, low: int = 1, high: int = 4, most: int = 9) -> list[int]:
        return [self.int(1, most) for _ in range(self.int(low, high))]

    def tensor(self, shape: Sequence[int], dtype: DataType) -> ark.Tensor:
        if not self.one((False, False, True)):
            return ark.tensor(list(shape), dtype)
        before = [self.int(0, 2) for _ in shape]
        whole = ark.tensor(
            [b + n + self.int(0, 2) for b, n in zip(before, shape, strict=True)], dtype
        )
        return whole[tuple(slice(b, b + n) for b, n in zip(before, shape, strict=True))]


def _elementwise(d: Draw, dtype: DataType) -> None:
    shape = d.shape()
    a = d.tensor([1 if d.one((False, False, True)) else n for n in shape], dtype)
    b = d.tensor([1 if d.one((False, False, True)) else n for n in shape], dtype)
    d.one((ark.add, ark.sub, ark.mul, ark.div))(a, b)
    ark.add(a, 2)
    ark.cast(b, d.one((*FLOATS, int32)))
    ark.constant(3, shape, dtype)
    ark.copy(b, output=d.tensor(b.shape(), dtype))
    if dtype is not int32:
        d.one((ark.exp, ark.gelu, ark.silu, ark.rsqrt))(a, output=a)


def _matmul(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    m, n, k = d.int(1, 13), d.int(1, 14), d.int(1, 20)
    ta, tb = d.one((False, True)), d.one((False, True))
    left, right = d.one((([], []), ([2], [2]), ([2, 1], [1, 3]), ([3, 1], [2])))
    a = d.tensor([*left, *((k, m) if ta else (m, k))], dtype)
    b = d.tensor([*right, *((n, k) if tb else (k, n))], dtype)
    ark.matmul(a, b, transpose_input=ta, transpose_other=tb)
    if not left:
        ark.matmul(
            ark.tensor([m, k], dtype), ark.parameter([2 * n, k], dtype), transpose_other=True
        )


def _rows(d: Draw, dtype: DataType) -> None:
    a = d.tensor(d.shape(), dtype)
    axis = d.int(0, len(a.shape()) - 1)
    d.one((ark.reduce_sum, ark.reduce_max))(a, axis, keepdims=d.one((False, True)))
    if dtype is int32:
        return
    ark.reduce_mean(a, axis)
    d.one((ark.softmax, ark.layernorm))(a)
    ark.rmsnorm(a, ark.tensor(a.shape()[-1:], dtype))
    ark.argmax(a)


def _movement(d: Draw, dtype: DataType) -> None:
    a = d.tensor(d.shape(2), dtype)
    ark.transpose(a, d.random.sample(range(len(a.shape())), len(a.shape())))
    if dtype is int32:
        return
    shape = d.shape(2)
    shape[-1] *= 2
    other = [1 if d.one((False, True)) else n for n in shape[:-1]]
    ark.rope(d.tensor(shape, dtype), d.tensor([*other, shape[-1]], dtype))
    ark.embedding(d.tensor(d.shape(1, 2, 5), int32), d.tensor([9, d.int(1, 40)], dtype))


def _caches(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    kv_heads, group, width = d.int(1, 3), d.int(1, 3), d.int(1, 9)
    rows, context = d.int(1, 4), d.one((5, 40, 530))
    position = ark.tensor([1], int32)
    caches = [ark.tensor([kv_heads, context, width], dtype) for _ in range(2)]
    fresh = d.tensor([rows, kv_heads * width], dtype)
    keys, values = (ark.kv_append(cache, fresh, position) for cache in caches)
    ark.attention(d.tensor([rows, kv_heads * group * width], dtype), keys, values, position)
    many, causal = d.int(1, 40), d.one((False, True))
    queries = d.tensor([2, many, kv_heads * group * width], dtype)
    plain = [ark.tensor([2, kv_heads, d.one((7, 70)), width], dtype)] * 2
    ark.attention(queries, *plain, causal=causal, window=d.int(0, 9) * causal)


def _experts(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    rows, slots, n, k = (d.int(1, 4) for _ in range(4))
    chosen = d.tensor([rows, slots], int32)
    weight = ark.tensor([9, 3 * n, 5 * k], dtype)
    ark.expert_linear(d.tensor(d.one(([rows, 5 * k], [rows, slots, 5 * k])), dtype), weight, chosen)
    ark.topk(d.tensor([rows, 3 + n], dtype), d.int(1, 3))


def _rotary(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    heads, pairs = d.int(1, 4), d.int(1, 5)
    x = d.tensor([d.int(1, 4), heads * 2 * pairs], dtype)
    position, frequencies = ark.tensor([1], int32), ark.tensor([pairs])
    ark.rotary_embedding(x, position, frequencies, interleaved=d.one((False, True)))


def _indexing(d: Draw, dtype: DataType) -> None:
    a = d.tensor(d.shape(2, 5, 5), dtype)
    shape = a.shape()
    axis = d.int(0, len(shape) - 1)
    pads = [(d.int(0, 3), d.int(0, 3)) for _ in shape]
    ark.pad(a, pads, d.one(("constant", "edge", "reflect", "wrap")))
    ark.flip(a, axis)
    ark.concat([a, a], axis)
    ids = d.tensor([min(n, 2) for n in shape], d.one((int32, int64)))
    ark.gather(a, d.tensor(d.shape(1, 2, 3), int32), axis)
    ark.gather_elements(a, ids, axis)
    ark.scatter_elements(a, ids, d.tensor(ids.shape(), dtype), axis, d.one(("set", "add")))
    ark.cumsum(a, axis, exclusive=d.one((False, True)), reverse=d.one((False, True)))


def _windows(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    image = d.tensor([2, 4, d.int(5, 9), d.int(5, 9)], dtype)
    stride, padding = d.int(1, 3), d.int(0, 1)
    ark.max_pool(image, d.int(2, 3), stride, padding)
    ark.avg_pool(image, 3, stride, padding, dilation=d.int(1, 2))
    kernel = ark.tensor([6, 2, d.int(1, 3), 2], dtype)
    ark.conv(image, kernel, stride=stride, padding=padding, groups=2)
    weight = ark.tensor([d.int(1, 20), 48], d.one((int4, ark.uint4, ark.fp4, ark.int8)))
    scales = ark.tensor([weight.shape()[0], 3], dtype)
    ark.quantized_linear(d.tensor([d.int(1, 3), 48], dtype), weight, scales)
    ark.cast(ark.dequantize(weight, scales, scales), int4)


Family = Callable[[Draw, DataType], None]
FAMILIES: tuple[Family, ...] = (
    _elementwise,
    _matmul,
    _rows,
    _movement,
    _caches,
    _experts,
    _rotary,
    _indexing,
    _windows,
)
SEEDS = int(os.environ.get("ARK_ACCESS_SEEDS", "1"))


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "MIN_TILE", 7)


def family_plan(family: Family, seed: int) -> Plan:
    """A model of many random calls: compiling is what costs."""
    model, draw = Model(), Draw(seed)
    with use_model(model):
        for dtype in (*FLOATS, int32):
            for _ in range(4):
                family(draw, dtype)
    made = make_plan(model.graph, target(3))
    verify([made])
    return made


def sum_plan(seed: int) -> Plan:
    """The last rank's plan of sums over two or three ranks."""
    draw = Draw(seed)
    world, packets = draw.int(2, 3), draw.one((False, True))
    calls = [(draw.shape(1, 3), draw.one((*FLOATS, int32))) for _ in range(3)]
    made = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            for shape, dtype in calls:
                ark.all_reduce(ark.tensor(shape, dtype), rank, world)
        made.append(make_plan(model.graph, target(3, packets)))
    verify(made)
    return made[-1]


def channel_plan(seed: int) -> Plan:
    """The last rank's end of a channel."""
    draw = Draw(seed)
    shape, dtype = draw.shape(1, 3), draw.one((*FLOATS, int32))
    made = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            shared, channel = ark.comm.symmetric(shape, dtype), ark.comm.channel(1 - rank)
            if rank == 0:
                (there,) = channel.wait(shared)
                channel.signal(after=[ark.copy(there, output=ark.tensor(shape, dtype))])
                channel.recv(ark.tensor(shape, dtype))
            else:
                channel.put(ark.tensor(shape, dtype), shared, signal=True)
                channel.wait()
                channel.reduce(ark.tensor(shape, dtype), shared)
                channel.flush()
                channel.send(ark.tensor(shape, dtype))
        made.append(make_plan(model.graph, target(3)))
    verify(made)
    return made[-1]


def decoder_plan(seed: int) -> Plan:
    """The last rank's plan of a small random decoder; odd seeds are not fused."""
    draw = Draw(seed)
    world, kv_heads, group = draw.int(1, 2), draw.int(1, 2), draw.int(1, 3)
    config = LlamaConfig(
        hidden_size=2 * draw.int(2, 20),
        intermediate_size=2 * draw.int(2, 20),
        num_hidden_layers=1,
        num_attention_heads=world * kv_heads * group,
        num_key_value_heads=world * kv_heads,
        head_dim=2 * draw.int(1, 5),
        vocab_size=draw.int(17, 70),
        max_position_embeddings=1024,
        eos_token_ids=(3,),
    )
    shape = Shape(config, draw.one(FLOATS), (9, 300)[seed // 2 % 2], 3 * (seed % 3), 0, world)
    machine = target(draw.int(2, 7), packets=seed % 4 < 2)
    return make_plans(shape, machine, {"fuse": seed % 2 == 0})[-1]


def batch_plan(seed: int) -> Plan:
    """A small random decoder's plan for several sequences; odd seeds are not fused."""
    draw = Draw(seed)
    heads = draw.int(1, 3)
    config = LlamaConfig(
        hidden_size=2 * draw.int(2, 20),
        intermediate_size=2 * draw.int(2, 20),
        num_hidden_layers=1,
        num_attention_heads=heads * draw.int(1, 3),
        num_key_value_heads=heads,
        head_dim=2 * draw.int(1, 5),
        vocab_size=draw.int(17, 70),
        max_position_embeddings=1024,
        eos_token_ids=(3,),
    )
    shape = Shape(config, draw.one(FLOATS), (9, 300)[seed // 2 % 2], 0, batch=draw.int(2, 4))
    machine = target(draw.int(2, 7), packets=seed % 4 < 2)
    return make_plans(shape, machine, {"fuse": seed % 2 == 0})[0]


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


def test_every_kind_is_among_them() -> None:
    """A new kind needs a call above that makes tasks of it. Transfers touch nothing themselves: the
    host's proxy does.
    """
    plans = [family_plan(family, 0) for family in FAMILIES]
    plans += [sum_plan(seed) for seed in range(2)] + [decoder_plan(seed) for seed in range(4)]
    plans += [channel_plan(0), batch_plan(0)]
    used = {op.kind for made in plans for op in made.ops}
    assert used == set(kinds.names()) - {"transfer"}


def _smaller(access: kinds.Access) -> kinds.Access:
    return dataclasses.replace(access, hi=(*access.hi[:-1], max(1, access.hi[-1] - 1)))


@pytest.mark.parametrize("which", ["reads", "writes"])
def test_a_declaration_that_is_too_small_is_found(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = family_plan(_movement, 0)
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
    made = family_plan(_caches, 0)
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
