"""Every op has a rule for splitting it, or a reason why it cannot be split. Parts along every
letter of a rule give the one-device result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ark
from ark.errors import UnsupportedError
from ark.ir.graph import Graph
from ark.lower import registry
from ark.parallel.transform import ParallelGraph, annotate
from ark.parallel.transform.op_rules import RULES, WHOLE
from ark.tasks.functions import FUNCTIONS
from tests.cases.transform import on_ranks_in_numpy, one_device, traced


def test_every_op_has_a_rule_or_a_reason() -> None:
    """Every op has a rule for splitting it or a reason why it has none. Elementwise ops share one
    rule. Ops between ranks need none, because graphs that are split do not contain them.
    """
    elementwise = registry.get("add").lower
    for name in registry.names():
        op = registry.get(name)
        ways = [
            name in RULES or name in FUNCTIONS or op.lower is elementwise,
            name in WHOLE,
            op.all_ranks or op.names_ranks,
        ]
        assert sum(ways) == 1, f"{name} needs a rule in op_rules.py, or a reason in WHOLE"
    assert {*RULES, *WHOLE} <= set(registry.names())


def x(*shape: int) -> Any:
    return ark.tensor(shape or (4, 6, 8))


def indices(*shape: int) -> Any:
    return ark.tensor(shape, ark.int32)


def attended(rows: int, heads: int, kv_heads: int, context: int, **given: Any) -> Any:
    cache = ark.tensor((kv_heads, context, 2)), ark.tensor((kv_heads, context, 2))
    return ark.attention(ark.tensor((rows, 2 * heads)), *cache, **given)


def largest() -> Any:
    values, places = ark.topk(x(4, 6), k=2)
    return ark.add(values, ark.cast(places, ark.fp32))


CASES: dict[str, Callable[[], Any]] = {
    "conv": lambda: ark.conv(x(4, 6, 7, 7), x(8, 6, 3, 3), x(8), stride=2, padding=1),
    "grouped conv": lambda: ark.conv(x(4, 6, 5), x(6, 3, 3), groups=2, dilation=2),
    "depthwise conv": lambda: ark.conv(x(4, 6, 5), x(6, 1, 3), groups=6),
    "conv 3d": lambda: ark.conv(x(2, 4, 3, 3, 3), x(4, 4, 2, 2, 2)),
    "conv_transpose": lambda: ark.conv_transpose(x(4, 6, 4), x(6, 4, 3), stride=2),
    "max_pool": lambda: ark.max_pool(x(4, 6, 8, 8), 3, stride=2, padding=1),
    "avg_pool": lambda: ark.avg_pool(x(4, 6, 8), 2, ceil=True, padding=1),
    "pad": lambda: ark.pad(x(), [(1, 1), (0, 2), (0, 0)]),
    "reflected pad": lambda: ark.pad(x(), [(0, 0), (2, 2), (0, 0)], mode="reflect"),
    "flip": lambda: ark.flip(x(), axis=1),
    "strided_slice": lambda: ark.strided_slice(x(), [0, 5, 1], [4, 2, 4], [1, -3, 2]),
    "tile": lambda: ark.tile(x(), [1, 2, 3]),
    "nearest resize": lambda: ark.resize(x(), [12]),
    "linear resize": lambda: ark.resize(x(), [6], mode="linear"),
    "concat": lambda: ark.concat([x(4, 2, 8), x(4, 6, 8)], axis=1),
    "gather": lambda: ark.gather(x(), indices(2, 4), axis=1),
    "gather_nd": lambda: ark.gather_nd(x(), indices(4, 2)),
    "gather_elements": lambda: ark.gather_elements(x(), indices(4, 4, 8), axis=1),
    "gather_elements of a part": lambda: ark.gather_elements(x(), indices(2, 4, 8), axis=1),
    "scatter_elements": lambda: ark.scatter_elements(
        x(), indices(4, 2, 8), x(4, 2, 8), 1, reduction="add"
    ),
    "scatter_elements of rows": lambda: ark.scatter_elements(x(), indices(2, 1, 1), x(2, 6, 8), 0),
    "scatter_elements of a part": lambda: ark.scatter_elements(
        x(), indices(2, 4, 8), x(2, 4, 8), 1
    ),
    "scatter_nd": lambda: ark.scatter_nd(x(4, 6), indices(2, 1), x(2, 6)),
    "cumsum": lambda: ark.cumsum(x(), axis=1),
    "reduce_prod": lambda: ark.reduce_prod(x(), axis=1),
    "argmax": lambda: ark.cast(ark.argmax(x()), ark.fp32),
    "argmin": lambda: ark.cast(ark.argmin(x(), axis=1), ark.fp32),
    "topk": largest,
    "one_hot": lambda: ark.one_hot(indices(4, 6), 4, ark.fp32, axis=1),
    "iota": lambda: ark.add(ark.iota([4, 6], 0, ark.fp32), ark.iota([4, 6], 1, ark.fp32)),
    "constant": lambda: ark.add(ark.constant(2.0, [4, 6]), x(4, 6)),
    "tril": lambda: ark.tril(x(), diagonal=1),
    "triu": lambda: ark.triu(x()),
    "dropout": lambda: ark.dropout(x(), rate=0.5, seed=3),
    "random_normal": lambda: ark.random_normal([4, 6], seed=3),
    "clip": lambda: ark.clip(x(), -1.0, 1.0),
    "hard_swish": lambda: ark.hard_swish(x()),
    "where": lambda: ark.where(ark.greater(x(), 0.0), x(), x(6, 8)),
    "batch_norm": lambda: ark.batch_norm(x(), *(ark.abs(x(6)) for _ in range(4))),
    "group_norm": lambda: ark.group_norm(x(), 2, x(6), x(6)),
    "rope": lambda: ark.rope(x(), x(6, 8)),
    "reshape": lambda: ark.reshape(x()[:, 0:4], [4, 2, 16]),
    "dequantize": lambda: ark.dequantize(ark.tensor((4, 8), ark.int8), x(4, 2)),
    "quantized_linear": lambda: ark.quantized_linear(
        x(2, 64), ark.tensor((4, 64), ark.int8), x(4, 4), x(4, 4)
    ),
    "attention": lambda: attended(4, 4, 2, 4),
    "placed attention": lambda: attended(4, 4, 2, 8, position=indices(1)),
    "attention without a mask": lambda: attended(4, 4, 2, 6, causal=False),
    "attention under a mask": lambda: attended(4, 4, 2, 6, causal=False, mask=x(4, 4, 6)),
    "attention with sinks": lambda: attended(4, 4, 4, 4, sinks=x(4)),
    "attention of texts": lambda: attended(4, 4, 8, 4, position=indices(4)),
    "batched attention": lambda: ark.attention(x(2, 4, 8), x(2, 2, 4, 2), x(2, 2, 4, 2)),
    "rotary_embedding": lambda: ark.rotary_embedding(x(4, 8), indices(1), x(2)),
    "rotary_embedding of texts": lambda: ark.rotary_embedding(x(4, 8), indices(4), x(2)),
    "paged_attention": lambda: ark.paged_attention(
        x(4, 16), x(3, 2, 16, 4), x(3, 2, 16, 4), indices(1, 2), indices(1)
    ),
}


def filled(graph: Graph) -> dict[str, np.ndarray]:
    """Returns random contents of the graph's inputs; indices are 0 or 1."""
    random = np.random.default_rng(5)
    written = {t.buffer.id for n in graph.nodes for t in n.outputs}
    inputs: dict[str, np.ndarray] = {}
    for tensor in graph.tensors:
        if tensor.buffer.id not in written and tensor.buffer.name not in inputs:
            shape = tensor.extents
            whole = random.integers(0, 2, shape) if tensor.dtype == ark.int32 else None
            drawn = random.integers(-3, 4, shape).astype(np.float32)
            inputs[tensor.buffer.name] = drawn if whole is None else whole
    return inputs


def cuts(graph: Graph) -> list[tuple[int, str]]:
    """Returns pairs of a node's number and a letter along which the node can be halved."""
    able = []
    for number, node in enumerate(ParallelGraph(graph, 2).nodes):
        annotation = annotate(node)
        sizes = annotation.sizes([t.shape for t in (*node.inputs, node.outputs[0])])
        free = set(sizes) - annotation.frozen - {"1"}
        able += [(number, letter) for letter in sorted(free) if sizes[letter] % 2 == 0]
    return able


@pytest.mark.parametrize("name", CASES)
def test_parts_along_every_letter_give_the_one_device_result(name: str) -> None:
    graph = traced(CASES[name])
    inputs = filled(graph)
    want = one_device(graph, inputs)
    able = cuts(graph)
    assert able
    for number, letter in able:
        plan = ParallelGraph(graph, 2)
        for at, node in enumerate(plan.nodes):
            (whole,) = plan.pieces(node)
            if at != number:
                plan.op_assign(whole, 0, 1)
                continue
            for rank, part in enumerate(plan.op_trans(whole, letter, 2)):
                plan.op_assign(part, rank)
        np.testing.assert_allclose(
            on_ranks_in_numpy(plan, inputs),
            want,
            rtol=1e-5,
            atol=1e-5,
            err_msg=f"{number} {letter}",
        )


def test_ops_that_are_not_split_say_why() -> None:
    state = None

    def build() -> Any:
        nonlocal state
        state = ark.TokenState.make(8)
        ark.advance(state, 4)
        return ark.copy(x(4))

    node = next(n for n in traced(build).nodes if n.type == "advance")
    with pytest.raises(UnsupportedError, match="because it moves the position"):
        annotate(node)
