"""Small plans that together use every task kind in every data type. The codegen tests of each
backend generate the kernel source of these plans and compile it. So a task kind for which a backend
cannot generate code is detected without its hardware.

Compilation takes most of the time. By default, each architecture of a backend compiles only some of
the types, and only some of the bodies (device functions of tasks) that are the same for all
vendors. With ARK_SLOW_TESTS=1 (`nox -s slow`) each is compiled in every type. Binaries are cached
by their source, so the next session compiles only what has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import cache

import ark
from ark import tasks
from ark.frontend.model import Model, use_model
from ark.ir.dtype import (
    CODES,
    FLOATS,
    DataType,
    bf16,
    cache_type,
    fp16,
    fp32,
    int8,
    int32,
    int64,
    row_type,
    uint4,
    uint8,
    uint32,
)
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.plans import plans as llama_plans
from ark.ops.scans import recurrence
from ark.plan import kind as kinds
from ark.plan.types import Plan, PlanBuffer, PlanOp, PlanTensor
from ark.plan.verify import verify
from ark.tasks.matmul_codes import row_type as row_type_of
from tests import custom
from tests.cases import attention_gradients
from tests.slow import SLOW

__all__ = ["plans", "tasks", "types_for", "united"]

ALL: tuple[DataType, ...] = (fp32, fp16, bf16, int32)

UNARY = (ark.exp, ark.sqrt, ark.rsqrt, ark.relu, ark.gelu, ark.sigmoid, ark.silu)
BINARY = (ark.add, ark.sub, ark.mul, ark.div)


def _elementwise(dtype: DataType) -> None:
    a = ark.tensor([3, 40], dtype)
    row = ark.tensor([1, 40], dtype)
    column = ark.tensor([2, 3, 1], dtype)
    for function in UNARY if dtype in FLOATS else ():
        function(a)
    for operator in BINARY:
        operator(a, row)
        operator(a, column)
        operator(a, 2)
        operator(2, a)
    ark.copy(a[1:, 3:7])
    ark.constant(3, (5, 7), dtype)
    for other in (fp32, fp16, bf16, int32):
        ark.cast(a, other)


def _regions(dtype: DataType) -> None:
    """Builds results that several ops read, with or without a sum between them. The last result is
    in place.
    """
    x, y = ark.tensor([3, 5, 130], dtype), ark.tensor([3, 1, 130], dtype)
    for each in (x, y):
        first, second = ark.mul(ark.cast(y, fp32), 0.5), ark.cast(each, fp32)
        for _ in range(10):
            first, second = second, ark.add(ark.mul(second, 0.25), first)
        if each is x:
            first, second = ark.reduce_sum(second, 1), ark.reduce_sum(first, 1)
        result = ark.div(first, ark.add(ark.mul(second, second), 1.0))
        if dtype is fp32:
            ark.copy(result, output=y)


def _row_sums(dtype: DataType) -> None:
    """Builds sums over rows, between ops on their elements. Rows are held by a part of a warp, or
    by several warps.
    """
    for columns in (64, 333, 4096):
        x, scale = ark.tensor([5, columns], dtype), ark.tensor([columns], dtype)
        centred = ark.sub(x, ark.reduce_mean(x, -1))
        total = ark.reduce_sum(ark.mul(centred, centred), -1)
        ark.mul(ark.mul(centred, ark.rsqrt(ark.add(total, 1.0))), scale, x)


def _matmuls(dtype: DataType) -> None:
    for ta in (False, True):
        for tb in (False, True):
            a = ark.tensor((20, 33) if ta else (33, 20), dtype)
            b = ark.tensor((70, 20) if tb else (20, 70), dtype)
            ark.matmul(a, b, transpose_input=ta, transpose_other=tb)
    wide = ark.parameter((8, 14336), dtype)
    ark.matmul(ark.tensor((1, 14336), dtype), wide, transpose_other=True)
    a = ark.tensor((2, 1, 64, 64), dtype)
    ark.matmul(a, ark.tensor((1, 3, 64, 128), dtype))
    ark.matmul(a, ark.tensor((1, 3, 128, 64), dtype), transpose_other=True)


def _rows(dtype: DataType) -> None:
    a = ark.tensor((5, 200), dtype)
    ark.softmax(a)
    ark.layernorm(a)
    ark.rmsnorm(a, ark.tensor((200,), dtype))
    wide = ark.cast(a, fp32)
    factor = ark.rsqrt(ark.add(ark.reduce_mean(ark.mul(wide, wide), 1), 1e-5))
    ark.mul(ark.tensor((200,), dtype), ark.cast(ark.mul(wide, factor), dtype))
    ark.argmax(a)
    for reduce in (ark.reduce_sum, ark.reduce_mean, ark.reduce_max):
        reduce(a, 0)
        reduce(a, 1, keepdims=False)
    b, column, row = (ark.tensor(s, dtype) for s in ((5, 200), (5, 1), (1, 200)))
    for axis, beside in ((0, row), (1, column)):
        ark.reduce_sum(ark.exp(ark.sub(a, beside)), axis)
        ark.reduce_max(ark.mul(ark.mul(a, b), beside), axis)
        ark.reduce_sum(ark.cast(ark.greater(a, 0.5), int64), axis)


def _integers(dtype: DataType) -> None:
    a = ark.tensor((5, 20), dtype)
    ark.reduce_sum(a, 0)
    ark.reduce_max(a, 1)
    ark.transpose(a, (1, 0))


def _movement(dtype: DataType) -> None:
    a = ark.tensor((2, 3, 40), dtype)
    ark.transpose(a, (2, 0, 1))
    ark.rope(a, ark.tensor((3, 40), dtype))
    ark.embedding(ark.tensor((3, 2), int32), ark.tensor((9, 40), dtype))
    position = ark.tensor((1,), int32)
    caches = [ark.tensor((2, 192, 16), dtype) for _ in range(2)]
    rows = ark.tensor((3, 32), dtype)
    keys, values = (ark.kv_append(cache, rows, position) for cache in caches)
    ark.attention(ark.tensor((3, 64), dtype), keys, values, position)
    sinks = ark.tensor((4,), fp32)
    ark.attention(ark.tensor((9, 64), dtype), keys, values, position, window=5, sinks=sinks)
    pools = [ark.tensor((6, 2, 32, 16), dtype) for _ in range(2)]
    table, places = ark.tensor((3, 4), int32), ark.tensor((3,), int32)
    paged = [ark.paged_append(pool, rows, table, places) for pool in pools]
    ark.paged_attention(ark.tensor((3, 64), dtype), *paged, table, places)
    ark.paged_attention(ark.tensor((9, 64), dtype), *paged, ark.tensor((1, 4), int32), position)
    ark.kv_cache_slot(ark.tensor((6, 2, 16), dtype), ark.tensor((2, 16), dtype), position)
    for interleaved in (False, True):
        ark.rotary_embedding(rows, position, ark.tensor((8,)), interleaved)


def _gradients(dtype: DataType) -> None:
    """Builds attention whose second result is a logarithm, and gradients of attention."""
    attention_gradients.with_logarithms(attention_gradients.Case(2, 3, 130, 130, 32), dtype)
    for mask in ("", "keys", "bias"):
        case = attention_gradients.Case(2, 3, 70, 90, 32, causal=not mask, mask=mask)
        attention_gradients.single(case, dtype)


def _caches_of_codes(dtype: DataType) -> None:
    """Builds appends to caches of codes, and attention of one row and of many rows over them."""
    position, rows = ark.tensor((1,), int32), ark.tensor((9, 32), dtype)
    table, one = ark.tensor((1, 4), int32), ark.tensor((1, 64), dtype)
    for codes in ("int8", "fp8_e4m3"):
        kind = cache_type(codes, 16, dtype)
        keys, values = (ark.kv_append(ark.tensor((2, 192, 16), kind), rows, position) for _ in "kv")
        pages = [
            ark.paged_append(ark.tensor((6, 2, 32, 16), kind), rows, table, position) for _ in "kv"
        ]
        for query in (one, ark.tensor((9, 64), dtype)):
            ark.attention(query, keys, values, position)
            ark.paged_attention(query, *pages, table, position)


def _types(dtype: DataType) -> None:
    """Builds ops on integers and bools, types of 4 bits, and tensors of more than four
    dimensions.
    """
    whole = {fp32: int64, fp16: uint32, bf16: int8, int32: int32}[dtype]
    a, b = ark.tensor([2, 3, 2, 5, 4, 8], whole), ark.tensor([3, 1, 5, 1, 8], whole)
    chosen = ark.where(ark.less(a, b), ark.mod(a, 3), ark.maximum(a, b))
    ark.cast(ark.logical_not(ark.greater(chosen, 7)), fp16)
    ark.transpose(a, (5, 1, 3, 0, 2, 4))
    for reduce in (ark.reduce_sum, ark.reduce_min, ark.reduce_prod):
        reduce(a, 1)
        reduce(a, 5)
    ark.argmax(a, axis=2, dtype=int64)
    ark.embedding(ark.tensor((3,), int64), ark.tensor((9, 40)))
    packed = {fp32: ark.int4, fp16: ark.uint4, bf16: ark.fp4, int32: ark.int4}[dtype]
    c = ark.tensor([3, 7, 18], packed)
    ark.cast(ark.cast(c, fp32), packed)
    ark.transpose(c, (2, 0, 1))
    if dtype in FLOATS:
        x = ark.tensor([2, 3, 4, 5, 6], dtype)
        for name in ("floor", "round", "erf", "atan", "sinh", "asinh", "atanh", "mish"):
            getattr(ark, name)(x)
        ark.fmod(ark.pow(x, x), x)
        ark.softmax(ark.matmul(x, x, transpose_other=True))
    total = ark.copy(ark.tensor([64], dtype))
    for _ in range(14):
        total = ark.add(total, ark.tensor([64], dtype))


def _indexing(dtype: DataType) -> None:
    """Builds ops that move elements by index, windows, and weights of few bits."""
    a = ark.tensor([2, 4, 9, 18], dtype)
    for mode in ("constant", "edge", "reflect", "wrap"):
        ark.pad(a, [(0, 0), (0, 0), (2, 1), (1, 2)], mode)
    ark.concat([ark.flip(a, 3), a], 1)
    ids = ark.tensor([2, 4, 3, 18], int64)
    ark.gather(a, ark.tensor([3, 2], int32), 2)
    ark.gather_elements(a, ids, 2)
    ark.scatter_elements(a, ids, ark.tensor([2, 4, 3, 18], dtype), 2, "add")
    ark.cumsum(a, 2)
    if dtype in FLOATS:
        recurrence(a, ark.tensor([2, 4, 9, 18], dtype), 2)
        ark.grad(ark.max_pool(a, 3, 2, 1), a, ark.tensor([2, 4, 5, 9], dtype))
        ark.avg_pool(a, 2)
        ark.conv(a, ark.tensor([8, 2, 3, 3], dtype), padding=1, groups=2)
        ark.resize(a, (18, 9), "linear")
        scales = ark.tensor([40, 4], dtype)
        for packed in (ark.int4, ark.uint4, ark.fp4, int8, ark.fp8_e4m3):
            ark.quantized_linear(ark.tensor([2, 64], dtype), ark.tensor([40, 64], packed), scales)


def _depthwise(dtype: DataType) -> None:
    """Builds depthwise convolutions and convolutions in groups. All of them keep channels last,
    because they follow a convolution whose windows box copies load.
    """
    x = ark.conv(ark.tensor([4, 64, 56, 56], dtype), ark.tensor([64, 64, 3, 3], dtype), padding=1)
    for size in (3, 7):
        x = ark.conv(x, ark.tensor([64, 1, size, size], dtype), padding=size // 2, groups=64)
        x = ark.conv(ark.relu(x), ark.tensor([64, 64, 1, 1], dtype))
    for each in (8, 16):
        x = ark.conv(x, ark.tensor([64, each, 3, 3], dtype), padding=1, groups=64 // each)


def _quantised(dtype: DataType) -> None:
    """Builds products with weights of quantised rows, for one, several and many input rows."""
    for codes in CODES:
        group, scales = (128, bf16) if codes.packed else (512, fp32)
        for zeros in (False, True) if codes in (uint4, uint8) else (False,):
            rows = row_type(codes, 512, group, scales, zeros, fp16 if dtype is fp16 else bf16)
            weight = ark.parameter((264, 512), rows)
            for number in (1, 3, 16, 80):  # on some machines 16 rows are multiplied by codes
                x = ark.tensor((number, 512), dtype)
                ark.linear(ark.rmsnorm(x, ark.tensor((512,), dtype)), weight)


def _experts(dtype: DataType) -> None:
    rows = ark.tensor((3, 72), dtype)
    _, chosen = ark.topk(rows, 2)
    products = ark.expert_linear(rows, ark.tensor((72, 40, 72), dtype), chosen)
    ark.expert_linear(products, ark.tensor((72, 24, 40), dtype), chosen)
    scores, few = ark.topk(ark.tensor((3, 12), dtype), 2)
    gate, up = (ark.expert_linear(rows, ark.tensor((12, 40, 72), dtype), few) for _ in "gu")
    gated = (gate + ark.gather(ark.tensor((12, 40), dtype), few, axis=0)) * up
    outputs = ark.expert_linear(gated, ark.tensor((12, 24, 40), dtype), few)
    weighted = outputs * ark.reshape(ark.softmax(scores), (3, 2, 1))
    total = ark.reduce_sum(weighted, axis=1, keepdims=False)
    ark.tensor((3, 24), dtype) + total


def _custom(dtype: DataType) -> None:
    if dtype is int32:
        custom.count_up()(ark.tensor([150], dtype), ark.tensor([150], dtype), twice=True)
        return
    x = ark.tensor([9, 40], dtype)
    custom.scale()(x, ark.tensor([40], dtype))
    custom.blur()(x)
    custom.shares()(x)


_CASES: tuple[tuple[str, Callable[[DataType], None], tuple[DataType, ...]], ...] = (
    ("elementwise", _elementwise, (fp32, fp16, bf16, int32)),
    ("quantised", _quantised, (fp32, fp16, bf16)),
    ("depthwise", _depthwise, (fp16, bf16)),
    ("regions", _regions, (fp32, fp16, bf16)),
    ("row_sums", _row_sums, (fp32, fp16, bf16)),
    ("matmul", _matmuls, FLOATS),
    ("rows", _rows, FLOATS),
    ("integers", _integers, (int32,)),
    ("movement", _movement, FLOATS),
    ("gradients", _gradients, FLOATS),
    ("caches of codes", _caches_of_codes, FLOATS),
    ("experts", _experts, FLOATS),
    ("types", _types, ALL),
    ("indexing", _indexing, ALL),
    ("custom", _custom, ALL),
)


def _llama(machine: Machine, types: Sequence[DataType]) -> list[tuple[str, Plan]]:
    results = []
    for dtype in (t for t in FLOATS if t in types):
        config = LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=600,
            max_position_embeddings=256,
        )
        shape = Shape(config, dtype, 192, 16)
        for fused in (True, False):
            name = f"llama-{dtype.name}-{'fused' if fused else 'unfused'}"
            results.append((name, llama_plans(shape, machine, {"fuse": fused})[0]))
        batch = Shape(config, dtype, 192, 0, batch=2)
        results.append((f"llama-{dtype.name}-batch", llama_plans(batch, machine)[0]))
        full = Shape(config, dtype, 192, 16, sampling="full", logprobs=3)
        results.append((f"llama-{dtype.name}-sampling", llama_plans(full, machine)[0]))
        pair = Shape(config, dtype, 192, 16, 0, 2)
        results += [(f"llama-{dtype.name}-rank{p.rank}", p) for p in llama_plans(pair, machine)]
    return results


def _sums(machine: Machine, types: Sequence[DataType]) -> list[tuple[str, Plan]]:
    results = []
    for dtype in types:
        pair = []
        for rank in range(2):
            model = Model(rank, 2)
            with use_model(model):
                ark.all_reduce(ark.tensor((5, 41), dtype), rank, 2, algorithm="ring")
            pair.append(plan(model.graph, machine))
        verify(pair)
        results.append((f"sums-{dtype.name}", pair[0]))
    return results


def _overlapped(machine: Machine, types: Sequence[DataType]) -> list[tuple[str, Plan]]:
    """Builds products whose tiles are sent to a peer on completion, and a product of rows that are
    gathered from a peer.
    """

    def first(dtype: DataType, m: int, n: int, k: int, gathered: bool) -> Plan:
        pair = []
        for rank in range(2):
            model = Model(rank, 2)
            with use_model(model):
                a, b = ark.tensor((m, k), dtype), ark.tensor((k, n), dtype)
                ark.all_reduce(ark.matmul(a, b), rank, 2)
                if gathered:
                    ark.matmul(ark.all_gather(a, rank, 2), b)
            pair.append(plan(model.graph, machine, {"overlap": True}))
        verify(pair)
        return pair[0]

    results = []
    floats = [t for t in FLOATS if t in types]
    for dtype in floats[:1]:
        results.append((f"overlapped-{dtype.name}", first(dtype, 768, 512, 64, False)))
    for dtype in [t for t in floats if t.itemsize == 2 and machine.has(Capability.WGMMA)][:1]:
        results.append((f"bands-{dtype.name}", first(dtype, 1024, 1024, 512, True)))
    return results


def _channels(machine: Machine, types: Sequence[DataType]) -> list[tuple[str, Plan]]:
    """Builds both ends of a channel, with every engine that can move its bytes."""
    results = []
    for dtype in types[:1]:
        pair = []
        for rank in range(2):
            model = Model(rank, 2)
            with use_model(model):
                shared = ark.comm.symmetric([999], dtype)
                other, channel = ark.comm.symmetric([999], dtype), ark.comm.channel(1 - rank)
                if rank == 0:
                    x = ark.tensor([999], dtype)
                    channel.put(x, shared, signal=True)
                    channel.wait()
                    channel.reduce(x, shared)
                    channel.get(shared)
                    channel.send(x)
                    if machine.has(Capability.PEER_BULK):
                        ark.comm.channel(1, 1, "bulk").put(x, other, signal=True)
                else:
                    kept = ark.copy(*channel.wait(shared), output=ark.tensor([999], dtype))
                    channel.signal(after=[kept])
                    if machine.has(Capability.PEER_BULK):
                        ark.copy(*ark.comm.channel(0, 1, "bulk").wait(other))
                    channel.recv(ark.tensor([999], dtype))
            pair.append(plan(model.graph, machine))
        verify(pair)
        results += [(f"channel{p.rank}-{dtype.name}", p) for p in pair]
    return results


def _claimed(machine: Machine, types: Sequence[DataType]) -> list[tuple[str, Plan]]:
    """Builds ops that are large enough for processors to take their tiles at run time, if the
    machine supports it.
    """
    results = []
    for dtype in [t for t in types if t in FLOATS and machine.has(Capability.CLAIMS)][:1]:
        model = Model()
        with use_model(model):
            x = ark.softmax(ark.tensor([8192, 4096], dtype))
            ark.gather(ark.mul(x, x), ark.tensor([8192], ark.int32), 0)
        result = plan(model.graph, machine)
        verify([result])
        results.append((f"claimed-{dtype.name}", result))
    return results


@cache
def plans(machine: Machine, types: tuple[DataType, ...] = ALL) -> list[tuple[str, Plan]]:
    """Verified plans for `machine` with their names, always in the same order."""
    results = []
    for case, build, dtypes in _CASES:
        for dtype in (t for t in dtypes if t in types):
            model = Model()
            with use_model(model):
                build(dtype)
            result = plan(model.graph, machine)
            verify([result])
            results.append((f"{case}-{dtype.name}", result))
    for ranks in (_sums, _llama, _overlapped, _channels, _claimed):
        results += ranks(machine, types)
    return results


def types_for(arch: str, archs: Sequence[str]) -> tuple[DataType, ...]:
    """The types in which an architecture's bodies are compiled: one float type and its share of the
    others.
    """
    if SLOW:
        return ALL
    at = archs.index(arch)
    floats = [t for t in ALL if t in FLOATS]
    others = [t for t in ALL if t not in FLOATS]
    return (floats[(at + 1) % len(floats)], *others[at :: len(archs)])


def _of_one_variant(planned: Plan, op: PlanOp) -> bool:
    """True if an op can run only in one of the kernel variants `roles` and `matrix`: a product with
    quantised weights, or the layer of several rows that computes logits and samples.
    """
    if op.kind == "matmul" and row_type_of(kinds.signature(planned, op).operands[1]) is not None:
        return True
    several = op.kind == "linear" and planned.tensors[op.operands[2]].shape[0] > 1
    return several and op.params["epilogue"] == "sample"


def united(
    machine: Machine,
    types: tuple[DataType, ...],
    own: Collection[str] = (),
    which: int = 0,
    share: int = 24,
) -> list[Plan]:
    """Combines the ops of `plans` into plans of at most `share` ops each. Ops with an equal
    signature (task kind, parameters and operand layouts) are included once. In the slow run all
    signatures are included. By default the first signature of each task kind is included, and of
    the further ones every fourth if the backend has a specialised body for the kind, otherwise
    every eighth. `which`: an offset that selects other ones of them.
    """
    result = [plan for _, plan in plans(machine, types)]
    seen, first_of, skipped = set(), set(), {4: 0, 8: 0}
    tensors: list[PlanTensor] = []
    buffers: list[PlanBuffer] = []
    ops: list[PlanOp] = []
    for one in result:
        for op in one.ops:
            key = kinds.signature(one, op).key
            if key in seen or _of_one_variant(one, op):
                continue
            seen.add(key)
            every = 4 if op.kind in own else 8
            skipped[every] += 1
            if not SLOW and op.kind in first_of and (skipped[every] + which) % every:
                continue
            first_of.add(op.kind)
            first = len(tensors)
            for tensor in (one.tensors[i] for i in op.operands):
                buffer = one.buffers[tensor.buffer]
                buffers.append(dataclasses.replace(buffer, id=len(buffers)))
                tensors.append(
                    dataclasses.replace(tensor, id=len(tensors), buffer=len(buffers) - 1)
                )
            operands = tuple(range(first, len(tensors)))
            ops.append(dataclasses.replace(op, id=len(ops) % share, operands=operands))
    common = {"tensors": tuple(tensors), "buffers": tuple(buffers)}
    return [
        dataclasses.replace(result[0], ops=tuple(ops[at : at + share]), **common)
        for at in range(0, len(ops), share)
    ]
