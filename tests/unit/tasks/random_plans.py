"""Random models whose plans test_accesses runs: ops, sums, channels, decoders."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Sequence

from ark_cpu import machines

import ark
from ark.frontend.model import Model, use_model
from ark.ir.dtype import FLOATS, DataType, bf16, fp16, fp32, int4, int32, int64, row_type
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.models.build import Shape
from ark.models.config import LlamaConfig
from ark.models.plans import make_plans
from ark.plan.types import Plan
from ark.plan.verify import verify
from tests import custom
from tests.cases import attention_gradients
from tests.cases.rotary_products import Projection
from tests.slow import SLOW


def target(processors: int, packets: bool = False) -> Machine:
    model = machines.model(processors)
    if packets:
        model = model.with_capabilities(Capability.PACKETS)
    return dataclasses.replace(model, tile=(5, 6))


class Draw:
    """Draws random operands: tensors, some of which are boxes of larger tensors."""

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


def _halves(d: Draw, dtype: DataType) -> None:
    """Adds products whose heads are rotated by halves. Tiles have rows of several sequences."""
    if dtype is int32:
        return
    batch, positions = d.one(((1, 1), (3, 1), (3, 3)))
    projection = Projection(
        batch, d.int(4, 30), d.int(1, 40), d.int(1, 5), 2 * d.int(1, 9), d.one((False, True))
    )
    projection = dataclasses.replace(projection, positions=positions, dtype=dtype)
    projection.build(*(ark.tensor(s, dtype) for s in projection.shapes))


def long_products(d: Draw, dtype: DataType) -> None:
    """Adds products of few rows with a long k: with many threads, both operands pass through shared
    memory.
    """
    for rows in (1, 2, 3, 5):
        for ta, tb in ((False, True), (True, True), (False, False)):
            n, k = d.int(1, 4), d.int(1030, 1100)
            a = d.tensor((k, rows) if ta else (rows, k), dtype)
            b = d.tensor((n, k) if tb else (k, n), dtype)
            ark.matmul(a, b, transpose_input=ta, transpose_other=tb)


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


def movement(d: Draw, dtype: DataType) -> None:
    a = d.tensor(d.shape(2), dtype)
    ark.transpose(a, d.random.sample(range(len(a.shape())), len(a.shape())))
    if dtype is int32:
        return
    shape = d.shape(2)
    shape[-1] *= 2
    other = [1 if d.one((False, True)) else n for n in shape[:-1]]
    ark.rope(d.tensor(shape, dtype), d.tensor([*other, shape[-1]], dtype))
    ark.embedding(d.tensor(d.shape(1, 2, 5), int32), d.tensor([9, d.int(1, 40)], dtype))


def caches(d: Draw, dtype: DataType) -> None:
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


def _gradients(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    sizes = (d.int(1, 2), d.int(1, 3), d.int(1, 40), d.int(1, 40), d.int(1, 9))
    case = attention_gradients.Case(*sizes, d.one((False, True)), d.one(("", "keys", "bias")))
    attention_gradients.single(case, dtype, d.one(FLOATS))
    attention_gradients.with_logarithms(case, dtype)


def _paged(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    kv_heads, group, width, rows = d.int(1, 3), d.int(1, 3), d.int(1, 9), d.int(1, 4)
    pages, position = ark.tensor([rows, d.int(1, 3)], int32), ark.tensor([rows], int32)
    pool = [ark.tensor([d.int(2, 4), kv_heads, d.int(1, 5), width], dtype)] * 2
    fresh = d.tensor([rows, kv_heads * width], dtype)
    keys, values = (ark.paged_append(cache, fresh, pages, position) for cache in pool)
    query = d.tensor([rows, kv_heads * group * width], dtype)
    ark.paged_attention(query, keys, values, pages, position)
    alone, at = ark.tensor([1, d.int(1, 3)], int32), ark.tensor([1], int32)
    queries = d.tensor([d.int(8, 20), kv_heads * group * width], dtype)
    ark.paged_attention(queries, keys, values, alone, at, window=d.int(0, 9))


def _experts(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    rows, slots, n, k = (d.int(1, 4) for _ in range(4))
    chosen = d.tensor([rows, slots], int32)
    weight = ark.tensor([9, 3 * n, 5 * k], dtype)
    ark.expert_linear(d.tensor(d.one(([rows, 5 * k], [rows, slots, 5 * k])), dtype), weight, chosen)
    ark.topk(d.tensor([rows, 3 + n], dtype), d.int(1, 3))
    scores, few = ark.topk(d.tensor([rows, 9], dtype), slots)
    scores = ark.softmax(scores)
    x = d.tensor([rows, 5 * k], dtype)
    gate, up = (ark.expert_linear(x, ark.tensor([9, 3 * n, 5 * k], dtype), few) for _ in "gu")
    gated = (gate + ark.gather(ark.tensor([9, 3 * n], dtype), few, axis=0)) * up
    outputs = ark.expert_linear(gated, ark.tensor([9, 7, 3 * n], dtype), few)
    weighted = outputs * ark.reshape(scores, (rows, slots, 1))
    d.tensor([rows, 7], dtype) + ark.reduce_sum(weighted, axis=1, keepdims=False)


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


def _regions(d: Draw, dtype: DataType) -> None:
    """Adds elementwise ops that share operands and are fused as one region, with sums over a
    dimension. The last result may be written in place.
    """
    count, wide = d.int(2, 5), d.int(64, 90)
    few = d.tensor([d.int(1, 3), 1, wide], fp32)
    many = d.tensor([few.shape()[0], d.one((count, 1)), d.one((wide, 1))], fp32)
    values = [ark.mul(few, 0.5), ark.add(few, many)]
    for _ in range(12):
        values.append(ark.add(ark.mul(values[-1], 0.25), values[-2]))
    end = values[-1]
    if end.shape()[1] > 1:
        end = ark.reduce_sum(end, 1)
    ark.mul(end, few, output=d.one((few, ark.tensor(few.shape()))))


def _row_sums(d: Draw, dtype: DataType) -> None:
    """Adds sums over rows, with ops on the rows' elements before, between and after them. Results
    may be written in place, and a sum may be kept.
    """
    if dtype is int32:
        return
    x = d.tensor([d.int(2, 9), d.int(64, 80)], dtype)
    other = d.tensor([d.one((1, x.shape()[0])), d.one((1, x.shape()[1]))], dtype)
    centred = ark.sub(ark.add(x, other), ark.reduce_mean(x, -1))
    total = ark.reduce_sum(ark.mul(centred, centred), -1)
    if d.int(0, 1):
        ark.copy(total, output=ark.tensor(total.shape(), total.dtype()))
    result = ark.mul(centred, ark.rsqrt(ark.add(total, 1.0)))
    ark.copy(result, output=d.one((x, ark.tensor(x.shape(), dtype))))


def _windows(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    image = d.tensor([2, 4, d.int(5, 9), d.int(5, 9)], dtype)
    stride, padding = d.int(1, 3), d.int(0, 1)
    largest = ark.max_pool(image, d.int(2, 3), stride, padding)
    ark.grad(largest, image, ark.tensor(largest.shape(), dtype))
    ark.avg_pool(image, 3, stride, padding, dilation=d.int(1, 2))
    kernel = ark.tensor([6, 2, d.int(1, 3), 2], dtype)
    ark.conv(image, kernel, stride=stride, padding=padding, groups=2)
    weight = ark.tensor([d.int(1, 20), 48], d.one((int4, ark.uint4, ark.fp4, ark.int8)))
    scales = ark.tensor([weight.shape()[0], 3], dtype)
    ark.quantized_linear(d.tensor([d.int(1, 3), 48], dtype), weight, scales)
    ark.cast(ark.dequantize(weight, scales, scales), int4)


def _quantised(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        return
    codes, k = d.one((int4, ark.int8)), 256  # 256 columns need no padding, which no task would read
    rows = row_type(codes, k, 32, d.one((fp16, fp32)), False, fp16 if dtype is fp16 else bf16)
    weight = ark.parameter([d.int(1, 20), k], rows)
    for number in (1, d.int(9, 16)):
        ark.linear(d.tensor([number, k], dtype), weight)


def _custom(d: Draw, dtype: DataType) -> None:
    if dtype is int32:
        n = d.int(1, 150)
        custom.count_up()(d.tensor([n], dtype), d.tensor([n], dtype), twice=d.one((False, True)))
        return
    m, k = d.int(1, 13), d.int(1, 20)
    x = d.tensor([m, k], dtype)
    custom.scale()(x, d.tensor([k], dtype), by=d.one((2.0, 3.0)))
    custom.blur()(x)
    custom.shares()(x)


Family = Callable[[Draw, DataType], None]
FAMILIES: tuple[Family, ...] = (
    _elementwise,
    _matmul,
    _halves,
    _rows,
    movement,
    caches,
    _gradients,
    _paged,
    _experts,
    _rotary,
    _indexing,
    _windows,
    _quantised,
    _regions,
    _row_sums,
    _custom,
)
TIMES = 4 if SLOW else 2  # calls of each family with each type
SEEDS = int(os.environ.get("ARK_ACCESS_SEEDS", "1"))


def family_plan(
    family: Family, seed: int, dtypes: Sequence[DataType] = (*FLOATS, int32), times: int = TIMES
) -> Plan:
    """Returns a plan of many random calls in one model, to compile once."""
    model, draw = Model(), Draw(seed)
    with use_model(model):
        for dtype in dtypes:
            for _ in range(times):
                family(draw, dtype)
    planned = make_plan(model.graph, target(3))
    verify([planned])
    return planned


def custom_packets() -> Plan:
    """Returns a plan of a chain of custom ops, on a machine with packets."""
    model = Model()
    with use_model(model):
        x = ark.exp(ark.tensor([13, 20]))
        custom.shares()(custom.scale()(custom.blur()(x), ark.tensor([20])))
    planned = make_plan(model.graph, target(3, packets=True))
    verify([planned])
    return planned


def sum_plan(seed: int) -> Plan:
    """Returns the last rank's plan of sums over two or three ranks: some plain, one of a product,
    one with a norm, and a product of gathered rows.
    """
    draw = Draw(seed)
    world, packets = draw.int(2, 3), draw.one((False, True))
    calls = [(draw.shape(1, 3), draw.one((*FLOATS, int32))) for _ in range(3)]
    rows, columns, kind = draw.int(1, 12), draw.int(1, 12), draw.one(FLOATS)
    plans = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            for shape, dtype in calls:
                ark.all_reduce(ark.tensor(shape, dtype), rank, world)
            a, b = ark.tensor([rows, 8], kind), ark.tensor([8, columns], kind)
            ark.relu(ark.all_reduce(ark.matmul(a, b), rank, world))
            c, d = ark.tensor([rows, 8], fp16), ark.tensor([8, columns], fp16)
            ark.matmul(ark.all_gather(c, rank, world), d)
            stream = ark.all_reduce(ark.tensor([rows, 8 * columns], kind), rank, world)
            ark.rmsnorm(stream, ark.tensor([8 * columns], fp32))
        plans.append(make_plan(model.graph, target(3, packets), {"overlap": True}))
    verify(plans)
    return plans[-1]


def groups_plan(seed: int) -> Plan:
    """Returns a plan of depthwise convolutions, and of others in groups, with channels last, as
    GPUs have them.
    """
    draw = Draw(seed)
    model = Model()
    for dtype in FLOATS:
        size, stride, dilation = ([draw.int(1, 3) for _ in range(2)] for _ in range(3))
        before, places = [draw.int(0, k - 1) for k in size], [draw.int(1, 7) for _ in range(2)]
        spans = zip(places, stride, size, dilation, strict=True)
        height, width = ((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in spans)
        given = {"size": size, "stride": stride, "dilation": dilation, "before": before}
        attrs, first = {**given, "sizes": places}, {"channels_first": True}
        sizes = draw.one((4, 8, 3)), draw.one((8, 4, 5))
        for name, groups, each, rows in (
            ("depthwise", draw.one((8, 16, 5)), 1, 1),
            ("grouped_convolution", draw.int(1, 4), *sizes),
        ):
            images = draw.int(1, 2)
            shape, form = [images, height, width, groups * each], attrs
            if name == "grouped_convolution" and draw.int(0, 1):
                shape, form = [images, groups * each, height, width], {**attrs, **first}
            with use_model(model):
                image = ark.tensor(shape, dtype)
                weight = ark.tensor([size[0] * size[1] * each, groups * rows], dtype)
                out = ark.tensor([images, *places, groups * rows], dtype)
            model.graph.add(name, [weight.ir, image.ir], [out.ir], form, name)
    planned = make_plan(model.graph, target(3))
    verify([planned])
    return planned


def channel_plan(seed: int) -> Plan:
    """Returns the plan of the last rank, at one end of a channel."""
    draw = Draw(seed)
    shape, dtype = draw.shape(1, 3), draw.one((*FLOATS, int32))
    plans = []
    for rank in range(2):
        model = Model(rank, 2)
        with use_model(model):
            shared, channel = ark.comm.symmetric(shape, dtype), ark.comm.channel(1 - rank)
            other, whole = ark.comm.symmetric(shape, dtype), ark.comm.channel(1 - rank, 1, "bulk")
            ark.all_reduce(ark.tensor([99, *shape], fp32), rank, 2, engine="switch")
            if rank == 0:
                (there,) = channel.wait(shared)
                channel.signal(after=[ark.copy(there, output=ark.tensor(shape, dtype))])
                channel.recv(ark.tensor(shape, dtype))
                ark.copy(whole.wait(other)[0])
            else:
                channel.put(ark.tensor(shape, dtype), shared, signal=True)
                channel.wait()
                channel.reduce(ark.tensor(shape, dtype), shared)
                channel.flush()
                channel.send(ark.tensor(shape, dtype))
                whole.put(ark.tensor(shape, dtype), other, signal=True)
        machine = target(3)
        able = machine.with_capabilities(Capability.PEER_BULK, Capability.PEER_MULTICAST)
        plans.append(make_plan(model.graph, able))
    verify(plans)
    return plans[-1]


def decoder_plan(seed: int) -> Plan:
    """Returns the last rank's plan of a small random decoder. Odd seeds are not fused."""
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
    """Returns a small random decoder's plan for several sequences. Plans of odd seeds are not
    fused; plans of even seeds support all options of SamplingParams.
    """
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
    if seed % 2 == 0:
        shape = dataclasses.replace(shape, sampling="full", logprobs=seed % 4)
    machine = target(draw.int(2, 7), packets=seed % 4 < 2)
    return make_plans(shape, machine, {"fuse": seed % 2 == 0})[0]
