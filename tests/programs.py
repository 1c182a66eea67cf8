"""Random programs over views and shared memory, with two independent ways to compute their results.

`reference` executes the program in NumPy, op by op, on one array per buffer. This defines the
result of a graph. `interpret` executes a finished plan in NumPy, task by task, on one array per
arena, in a random order that the plan's waits allow. The two share no code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

import ark
from ark.ir.graph import Graph
from ark.ir.values import Tensor
from ark.lower import registry
from ark.plan import kind as kinds
from ark.plan.types import Plan, PlanTensor
from ark.tasks import expression

SHAPES = [(12, 16), (16, 12), (12, 12), (9, 7), (2, 3, 4, 5), (30,)]
UNARY = (ark.relu, ark.sigmoid, ark.copy)


def _view(rng: np.random.Generator, tensor: ark.Tensor) -> ark.Tensor:
    """Returns the tensor or a view of a random box of it (a range in each dimension)."""
    if rng.random() < 0.4:
        return tensor
    index = []
    for n in tensor.shape():
        begin = int(rng.integers(0, n))
        index.append(slice(begin, int(rng.integers(begin + 1, n + 1))))
    return tensor[tuple(index)]


def _box(rng: np.random.Generator, tensor: ark.Tensor, shape: list[int]) -> ark.Tensor | None:
    """Returns a view of a random box of the tensor with the given shape, or None if the tensor is
    too small.
    """
    if len(tensor.shape()) != len(shape):
        return None
    index = []
    for n, s in zip(tensor.shape(), shape, strict=True):
        if s > n:
            return None
        begin = int(rng.integers(0, n - s + 1))
        index.append(slice(begin, begin + s))
    return tensor[tuple(index)]


def _step(rng: np.random.Generator, held: list[ark.Tensor]) -> ark.Tensor:
    """Adds one random op on the tensors held so far."""
    source = _view(rng, held[rng.integers(len(held))])
    shape = source.shape()
    choice = rng.integers(8)
    if choice == 0 and len(shape) == 2:
        return ark.transpose(source, [1, 0])
    if choice == 1:
        reduce = (ark.reduce_max, ark.reduce_mean, ark.reduce_sum)[rng.integers(3)]
        return reduce(source, int(rng.integers(len(shape))), keepdims=bool(rng.integers(2)))
    if choice == 2:
        return ark.softmax(source)
    if choice == 3 and len(shape) == 2:
        return ark.mul(ark.matmul(source, source, transpose_other=True), 1 / 64)
    if choice == 4:
        return ark.reshape(source, [-1])
    candidates = [_box(rng, t, shape) for t in held]
    fitting = [c for c in candidates if c is not None]
    other = fitting[rng.integers(len(fitting))]
    if choice == 5:
        return ark.mul(ark.add(source, other), 0.5)
    output = fitting[rng.integers(len(fitting))] if choice in (6, 7) else None
    if choice == 6:
        return ark.sub(source, other, output=output)
    return UNARY[rng.integers(len(UNARY))](source, output=output)


def build(seed: int, steps: int) -> tuple[list[ark.Tensor], list[ark.Tensor]]:
    """Adds a random program to the current model. Returns (inputs, tensors that are still held)."""
    rng = np.random.default_rng(seed)
    inputs = [
        ark.tensor(list(SHAPES[rng.integers(len(SHAPES))])) for _ in range(rng.integers(2, 5))
    ]
    held = list(inputs)
    for _ in range(steps):
        result = _step(rng, held)
        if rng.random() < 0.3:
            result = ark.identity(result, deps=[held[rng.integers(len(held))]])
        held.append(result)
        if len(held) > 6:
            del held[int(rng.integers(len(held)))]
    held.append(ark.add(held[-1], 1.0))
    return inputs, held


def contents(inputs: list[ark.Tensor], seed: int) -> dict[int, np.ndarray]:
    """Random initial contents by buffer id."""
    rng = np.random.default_rng(seed)
    return {
        t.ir.buffer.id: rng.uniform(-1, 1, t.ir.buffer.nbytes // 4).astype(np.float32)
        for t in inputs
    }


def _in(image: np.ndarray, tensor: Tensor | PlanTensor) -> np.ndarray:
    whole = image[: math.prod(tensor.extents)].reshape(tensor.extents)
    box = tuple(slice(o, o + n) for o, n in zip(tensor.offsets, tensor.shape, strict=True))
    return whole[box]


def reference(
    graph: Graph, first: dict[int, np.ndarray], iterations: int = 1
) -> dict[int, np.ndarray]:
    """The contents of all buffers after the program, in program order."""
    images = {b.id: np.zeros(b.nbytes // 4, np.float32) for b in graph.buffers}
    images.update({key: image.copy() for key, image in first.items()})
    for _ in range(iterations):
        for node in graph.nodes:
            define = registry.get(node.type).reference if not node.virtual else None
            if define is None:
                continue
            values = [_in(images[t.buffer.id], t).astype(np.float64) for t in node.inputs]
            with np.errstate(over="ignore"):
                results = define(values, node.attrs)
            for tensor, result in zip(node.outputs, results, strict=True):
                _in(images[tensor.buffer.id], tensor)[...] = result.reshape(tensor.shape)
    return images


def interpret(
    plan: Plan, first: dict[str, np.ndarray], seed: int, iterations: int = 1
) -> dict[str, np.ndarray]:
    """The contents of buffers by name after the plan, in a random order of tasks. Fails if no task
    can run.
    """
    rng = np.random.default_rng(seed)
    arenas = {a: np.full(n // 4, np.nan, np.float32) for a, n in plan.arenas.items()}
    images: dict[int, np.ndarray] = {}
    for b in plan.buffers:
        if b.arena == "external":
            images[b.id] = np.zeros(b.nbytes // 4, np.float32)
        else:
            images[b.id] = arenas[b.arena][b.offset // 4 : (b.offset + b.nbytes) // 4]
        if b.initial:
            images[b.id][:] = first.get(b.name, 0.0)
    for _ in range(iterations):
        for phase in plan.phases:
            counts: dict[int, int] = defaultdict(int)
            heads = [0] * plan.processors
            while any(h < len(t) for h, t in zip(heads, phase.processors, strict=True)):
                ready = [
                    p
                    for p, tasks in enumerate(phase.processors)
                    if heads[p] < len(tasks)
                    and all(counts[c] >= n for c, n in tasks[heads[p]].waits)
                ]
                assert ready, "no task can start"
                chosen = ready[rng.integers(len(ready))]
                task = phase.processors[chosen][heads[chosen]]
                heads[chosen] += 1
                _run_task(plan, images, task)
                for counter in task.signals:
                    counts[counter] += 1
    return {b.name: images[b.id].copy() for b in plan.buffers}


def _run_task(plan: Plan, images: dict[int, np.ndarray], task: Any) -> None:
    op = plan.ops[task.op]
    if op.kind == "iteration_end":
        return
    sig = kinds.signature(plan, op)
    accesses = kinds.get(op.kind).accesses(sig, task.coord)
    boxes = []
    for access in accesses:
        tensor = plan.tensors[op.operands[access.operand]]
        box = tuple(slice(a, b) for a, b in zip(access.lo, access.hi, strict=True))
        boxes.append(_in(images[tensor.buffer], tensor)[box])
    *inputs, target = boxes
    values = [b.astype(np.float64) for b in inputs]
    target[...] = _compute(op.kind, dict(op.params), values, len(target.shape))


def _compute(kind: str, p: dict[str, Any], values: list[np.ndarray], rank: int) -> np.ndarray:
    if kind == "elementwise":
        with np.errstate(over="ignore"):
            return expression.evaluate(p["expr"], values)
    if kind == "matmul":
        a = values[0].swapaxes(-1, -2) if p["transpose_a"] else values[0]
        b = values[1].swapaxes(-1, -2) if p["transpose_b"] else values[1]
        product = a @ b
        return expression.evaluate(p["expr"], [product, *values[2:]]) if "expr" in p else product
    if kind == "transpose":
        return values[0].transpose([d - 4 + rank for d in p["perm"][4 - rank :]])
    if kind == "reduce":
        apply = {"sum": np.sum, "mean": np.sum, "max": np.max}[p["function"]]
        with np.errstate(over="ignore"):
            x = expression.evaluate(p["term"], values) if "term" in p else values[0]
        total = apply(x, axis=p["axis"] - 4 + rank, keepdims=True)
        return total / p["count"] if p["function"] == "mean" else total
    if kind == "row_norm" and p["function"] == "softmax":
        e = np.exp(values[0] - values[0].max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    raise NotImplementedError(kind)
