"""The plans that are mutated. They are small, and between them have every kind of task of a single
rank: decoders, a training step, and ops that move, reduce, fuse or pack.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import by_name, fp32, row_type
from ark.lower.pipeline import plan
from ark.models.build import Shape
from ark.models.config import LlamaConfig, Rope
from ark.models.plans import make_plans
from ark.plan import serialize
from ark.plan.types import Plan
from tests import custom
from tests.cases import attention_gradients
from tests.fuzz import mutate

MACHINE = "cpu-2"


def decoder(batch: int = 1, fuse: bool = True, sampling: str = "") -> Plan:
    """Returns a plan of a decoder of two layers. With one sequence it also has a prompt phase in
    chunks of two tokens.
    """
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=64,
        max_position_embeddings=32,
        rope=Rope(theta=10000.0),
        tie_word_embeddings=True,
    )
    chunk = 2 if batch == 1 else 0
    shape = Shape(config, by_name("fp32"), 16, chunk, 0, 1, batch, sampling=sampling, logprobs=2)
    return make_plans(shape, registry.machine(MACHINE), {"fuse": fuse})[0]


def _training(optimizer: Callable[[list[Any]], Any]) -> None:
    """Builds a training step: forward, backward with a scattered gradient, and the optimizer."""

    class Small(ark.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = ark.parameter([6, 8])
            self.first = ark.parameter([12, 8])
            self.bias = ark.parameter([12])
            self.second = ark.parameter([4, 12])

        def forward(self, ids: ark.Tensor, y: ark.Tensor) -> ark.Tensor:
            x = ark.layernorm(ark.embedding(ids, self.table))
            hidden = ark.gelu(ark.add(ark.linear(x, self.first), self.bias))
            return ark.cross_entropy(ark.linear(ark.softmax(hidden), self.second), y)

    module = Small()
    module(ark.tensor([5], ark.int32), ark.tensor([5], ark.int32))
    module.backward()
    update = optimizer(list(module.params_dict().values()))
    update.step()


def _regions() -> None:
    """Builds an op with several results that contains reductions and writes the last result in
    place.
    """
    x, y = ark.tensor([3, 5, 70]), ark.tensor([3, 1, 70])
    first, second = ark.mul(x, 0.5), ark.add(x, y)
    for _ in range(12):
        first, second = second, ark.add(ark.mul(second, 0.25), ark.mul(first, y))
    first, second = ark.reduce_sum(first, 1), ark.reduce_sum(second, 1)
    ark.copy(ark.div(first, ark.add(ark.mul(second, second), 1.0)), output=y)


def _epilogues() -> None:
    """Builds matrix products that are fused with the ops after them, among them views."""
    a, b = ark.tensor([6, 8]), ark.tensor([8, 12])
    activated = ark.silu(ark.add(ark.matmul(a, b), ark.tensor([12])))
    ark.mul(ark.reshape(activated, [2, 3, 12]), 0.5)
    wide = ark.matmul(ark.tensor([2, 3, 8], ark.bf16), ark.tensor([2, 8, 8], ark.bf16))
    ark.cast(ark.relu(wide), ark.fp32)
    ark.linear(ark.rmsnorm(ark.tensor([1, 16]), ark.tensor([16])), ark.parameter([8, 16]))
    ark.swiglu(ark.tensor([2, 8]), ark.tensor([2, 8]))


def _moved() -> None:
    a, ids = ark.tensor([2, 4, 6]), ark.tensor([2, 3, 6], ark.int64)
    ark.gather(a, ark.tensor([3], ark.int32), 1)
    ark.gather_elements(a, ids, 1)
    ark.scatter_elements(a, ids, ark.tensor([2, 3, 6]), 1, "add")
    ark.scatter_nd(ark.tensor([4, 6]), ark.tensor([3, 1], ark.int32), ark.tensor([3, 6]))
    ark.pad(a, [(0, 0), (2, 1), (1, 2)], "reflect")
    ark.concat([ark.flip(a, 2), ark.transpose(a, (0, 1, 2))], 1)
    ark.transpose(a, (2, 0, 1))
    ark.where(ark.less(ark.iota([6], 0, ark.int32), 3), a, 0.0)


def _reduced() -> None:
    a = ark.tensor([3, 20])
    for reduce in (ark.reduce_sum, ark.reduce_mean, ark.reduce_max):
        reduce(a, 0)
        reduce(a, 1)
    ark.cumsum(a, 1)
    ark.argmax(a)
    ark.topk(a, 2)
    ark.softmax(a)
    wide = ark.tensor([7, 64])
    centred = ark.sub(wide, ark.reduce_mean(wide, 1))
    ark.reduce_mean(ark.mul(centred, centred), 1)
    _, chosen = ark.topk(ark.tensor([2, 6]), 2)
    ark.expert_linear(ark.tensor([2, 6]), ark.tensor([6, 5, 6]), chosen)


def _windows() -> None:
    a = ark.tensor([1, 4, 5, 6])
    largest = ark.max_pool(a, 3, 2, 1)
    ark.grad(largest, a, ark.tensor(largest.shape()))
    ark.conv(a, ark.tensor([4, 2, 3, 3]), padding=1, groups=2)
    ark.resize(a, (7, 4), "linear")
    ark.quantized_linear(ark.tensor([2, 32]), ark.tensor([8, 32], ark.int4), ark.tensor([8, 2]))


def _quantised() -> None:
    """Builds products with quantised weights, one with a single input row and one with many."""
    rows = row_type(ark.int4, 64, 32, ark.fp32, False, ark.bf16)
    weight = ark.parameter([8, 64], rows)
    for number in (1, 12):
        ark.linear(ark.tensor([number, 64], ark.bf16), weight)


def _attending() -> None:
    """Builds the ops that only decoders have: caches, rotary embeddings, attention by sequence,
    random sampling.
    """
    position = ark.tensor([1], ark.int32)
    rows = ark.tensor([2, 16])
    keys, values = (ark.kv_append(ark.tensor([1, 12, 16]), rows, position) for _ in range(2))
    sinks = ark.tensor([2])
    ark.attention(ark.tensor([2, 32]), keys, values, position, window=5, sinks=sinks)
    many = [ark.tensor([1, 192, 16], ark.fp16) for _ in range(2)]
    ark.attention(ark.tensor([1, 32], ark.fp16), many[0], many[1], position)
    ark.rotary_embedding(rows, position, ark.tensor([8]), True)
    ark.rope(ark.tensor([2, 3, 8]), ark.tensor([3, 8]))
    attention_gradients.single(attention_gradients.Case(1, 2, 3, 5, 16), fp32)
    ark.random_uniform([3, 4], 7, ark.tensor([1], ark.int64))


def _custom() -> None:
    """Builds custom ops that this process has registered."""
    x = ark.tensor([6, 9])
    custom.scale()(custom.blur()(x), ark.tensor([9]))
    custom.shares()(x)
    custom.count_up()(ark.tensor([70], ark.int32), ark.tensor([70], ark.int32), twice=True)


def _paged() -> None:
    """Builds two sequences whose caches are pages of one pool."""
    caches = [ark.tensor([6, 2, 8, 16]) for _ in range(2)]
    rows, at = ark.tensor([2, 64]), ark.tensor([2], ark.int32)
    pages = ark.tensor([2, 3], ark.int32)
    keys, values = (ark.paged_append(cache, rows[:, :32], pages, at) for cache in caches)
    ark.paged_attention(rows, keys, values, pages, at)
    ark.paged_attention(rows, keys, values, pages, at, window=5, sinks=ark.tensor([4]))


def _types() -> None:
    a, b = ark.tensor([2, 3, 8], ark.int64), ark.tensor([3, 1], ark.int64)
    chosen = ark.where(ark.less(a, b), ark.mod(a, 3), ark.maximum(a, b))
    ark.cast(ark.logical_not(ark.greater(chosen, 7)), ark.fp16)
    ark.cast(ark.cast(ark.tensor([3, 6], ark.int4), ark.fp32), ark.uint8)
    ark.cast(ark.tensor([3, 5], ark.bf16), ark.fp32)
    ark.bitwise_xor(ark.tensor([4], ark.uint32), ark.tensor([4], ark.uint32))


_BUILT: dict[str, Callable[[], None]] = {
    "adam": lambda: _training(lambda p: ark.optim.AdamW(p, lr=0.01)),
    "lamb": lambda: _training(lambda p: ark.optim.LAMB(p, lr=0.01)),
    "regions": _regions,
    "epilogues": _epilogues,
    "moved": _moved,
    "reduced": _reduced,
    "windows": _windows,
    "quantised": _quantised,
    "attending": _attending,
    "paged": _paged,
    "types": _types,
    "custom": _custom,
}
_DECODERS: dict[str, Callable[[], Plan]] = {
    "decoder": decoder,
    "unfused": lambda: decoder(fuse=False),
    "batch": lambda: decoder(2),
    "sampling": lambda: decoder(sampling="full"),
}
NAMES = (*_DECODERS, *_BUILT)


@cache
def base(name: str) -> tuple[Any, list[tuple[Any, ...]]]:
    """Returns the unmutated plan of that name as JSON, and the paths of all values in it."""
    if name in _DECODERS:
        base_plan = _DECODERS[name]()
    else:
        model = Model()
        with use_model(model):
            _BUILT[name]()
        base_plan = plan(model.graph, registry.machine(MACHINE))
    data = json.loads(serialize.to_json(base_plan))
    return data, mutate.places(data)


def mutated(rng: random.Random) -> str:
    """Returns the text of one of the plans with up to three changes. In half of the cases all
    changes are outside of tasks.
    """
    data, paths = base(rng.choice(("decoder", *NAMES)))
    if rng.random() < 0.5:
        paths = [p for p in paths if p[0] != "phases"]
    text = mutate.text_of(mutate.of_json(data, rng, paths))
    if rng.random() < 0.1:
        text = mutate.of_bytes(text.encode("utf-8", "replace"), rng).decode("utf-8", "replace")
    return text


def is_base(candidate: Plan) -> bool:
    """True if the plan is one of the unmutated plans."""
    data = json.loads(serialize.to_json(candidate))
    return any(data == base(name)[0] for name in NAMES)
