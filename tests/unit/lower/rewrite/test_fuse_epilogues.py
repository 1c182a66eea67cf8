"""Elementwise ops after a product are fused into it, but only if no other op needs the intermediate
result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ark_cpu
import numpy as np
import pytest
from ark_cuda import machines

import ark
from ark.frontend.model import Model, use_model
from ark.frontend.tensor import Tensor
from ark.ir.dtype import bf16, fp32
from ark.lower.pipeline import plan as make_plan
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_epilogues import fuse_epilogues
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor

M, N, K = 40, 24, 56
SHAPES = {"a": (M, K), "b": (N, K), "bias": (N,), "column": (M, 1), "rest": (M, N)}


def planned(build: Callable[..., Any], machine: Machine, scale: int = 1) -> Plan:
    """Returns the plan of build(a, b, bias, column, rest). The result's name is `out`."""
    model = Model()
    with use_model(model):
        kind = bf16 if scale > 1 else fp32
        inputs = [
            Tensor(
                model.graph.tensor(
                    [scale * n if n > 1 else n for n in shape], kind, arena="state", name=name
                ),
                model,
            )
            for name, shape in SHAPES.items()
        ]
        shape = [scale * M, scale * N]
        out = Tensor(model.graph.tensor(shape, kind, arena="state", name="out"), model)
        ark.copy(build(*inputs), out)
    task_plan = make_plan(model.graph, machine)
    verify([task_plan])
    return task_plan


def product(a: Any, b: Any) -> Any:
    return ark.matmul(a, b, transpose_other=True)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


JOINED = {
    "bias": (lambda a, b, bias, c, r: product(a, b) + bias, lambda p, bias, c, r: p + bias),
    "relu": (lambda a, b, *_: ark.relu(product(a, b)), lambda p, *_: np.maximum(p, 0)),
    "residual": (lambda a, b, x, c, r: r + product(a, b), lambda p, bias, c, r: r + p),
    "all": (
        lambda a, b, bias, c, r: ark.gelu(product(a, b) * c + bias) * 0.5 + r,
        lambda p, bias, c, r: gelu(p * c + bias) * 0.5 + r,
    ),
    "bias, read twice": (
        lambda a, b, bias, c, r: twice(product(a, b) + bias) + r,
        lambda p, bias, c, r: (p + bias) * (np.tanh(p + bias) + 1) + r,
    ),
}


def twice(x: Any) -> Any:
    return x * (ark.tanh(x) + 1.0)


@pytest.mark.parametrize("name", JOINED)
def test_epilogues_of_products_are_fused(name: str) -> None:
    build, wanted = JOINED[name]
    device = ark_cpu.backend.open(0)
    task_plan = planned(build, device.machine)
    assert [op.kind for op in task_plan.ops if op.kind != "iteration_end"] == ["matmul"]
    rng = np.random.default_rng(5)
    values = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    with Executor(task_plan, ark_cpu.backend, device) as executor:
        for tensor in {task_plan.tensors[t].name for op in task_plan.ops for t in op.operands} - {
            "out"
        }:
            executor.write(tensor, values[tensor])
        executor.start(2).wait(60)
        output = executor.read("out")
    a, b, *others = (values[n].astype(np.float64) for n in SHAPES)
    np.testing.assert_allclose(output, wanted(a @ b.T, *others), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["all", "bias, read twice"])
def test_variant_for_large_products_takes_them_in(name: str) -> None:
    task_plan = planned(JOINED[name][0], machines.MODELS["h100"], scale=32)
    assert task_plan.variant == "matrix"
    assert [op.kind for op in task_plan.ops if op.kind != "iteration_end"] == ["matmul"]


def test_product_with_another_reader_is_written() -> None:
    def build(a: Any, b: Any, bias: Any, column: Any, rest: Any) -> Any:
        x = product(a, b)
        return ark.relu(x) + ark.reduce_sum(x, 1)

    task_plan = planned(build, machines.MODELS["h100"], scale=32)
    assert "expr" not in next(op.params for op in task_plan.ops if op.kind == "matmul")


def test_product_is_not_moved_past_a_write_of_its_operands() -> None:
    def build(a: Any, b: Any, bias: Any, column: Any, rest: Any) -> Any:
        x = product(a, b)
        ark.copy(a * 2.0, a)
        return x + rest

    task_plan = planned(build, ark_cpu.backend.open(0).machine)
    assert "expr" not in next(op.params for op in task_plan.ops if op.kind == "matmul")


def normed(x: Any, *norm: Any) -> Any:
    """Returns a batch norm of x with one mean, variance, weight and bias for each column."""
    mean, variance, weight, shift = norm
    return (x - mean) * ark.rsqrt(variance + 1e-5) * weight + shift


def test_two_products_take_in_their_norms_and_one_the_sum() -> None:
    """relu(norm(x w) + norm(y v)): each product applies its own norm, and one of them also computes
    the sum, because one op cannot have all ten operands.
    """
    torch = pytest.importorskip("torch")
    names = ("x", "w", "y", "v", *(f"{side}{i}" for side in "ab" for i in range(4)))
    shapes = [(M, K), (K, K)] * 2 + [(K,)] * 8
    model = Model()
    with use_model(model):
        x, w, y, v, *norms = (
            ark.tensor(s, fp32, name=n) for n, s in zip(names, shapes, strict=True)
        )
        total = normed(ark.matmul(x, w), *norms[:4]) + normed(ark.matmul(y, v), *norms[4:])
        ark.relu(total, name="out")
    device = ark_cpu.backend.open(0)
    plan = make_plan(model.graph, device.machine)
    verify([plan])
    products = [op for op in plan.ops if op.kind == "matmul"]
    assert len(products) == 2 and all(op.params.get("expr") for op in products)
    results = [op.operands[-1] for op in plan.ops if op.kind == "elementwise"]
    assert all(math.prod(plan.tensors[t].shape) <= K for t in results)
    rng = np.random.default_rng(3)
    values = [rng.uniform(0.5, 1.5, s).astype(np.float32) for s in shapes]
    with Executor(plan, ark_cpu.backend, device) as executor:
        for name, value in zip(names, values, strict=True):
            executor.write(name, value)
        executor.start(1).wait(60)
        got = executor.read("out")
    x, w, y, v, *norms = map(torch.from_numpy, values)
    peer = torch.nn.functional.batch_norm
    want = torch.relu(peer(x @ w, *norms[:4]) + peer(y @ v, *norms[4:]))
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-3)


def test_products_cast_to_integers_are_added_as_integers() -> None:
    """The sum of two products that are cast to int32 is computed in integers. It is odd and above
    2^24, so fp32 cannot represent it.
    """
    torch = pytest.importorskip("torch")
    x, w = torch.full((4, 64), 511.0), torch.full((4, 64), 511.0)
    y, v = x.clone(), w.clone()
    y[:, 0], v[:, 0] = 510.0, 512.0
    ark.init(backend="cpu")
    total = ark.add(ark.cast(product(x, w), ark.int32), ark.cast(product(y, v), ark.int32))
    assert (np.asarray(total.eval()) == 2 * 64 * 511 * 511 - 1).all()


def test_products_that_boxes_cannot_load_keep_matrix_units() -> None:
    """With an epilogue the body of such a product does not use matrix units. That is faster for
    small products only. A product of one column does not use them in any case.
    """
    machine = machines.MODELS["h200"].using("matrix")
    kept_apart = ["matmul", "relu"]
    for depth, columns, types in (
        (864, 49, kept_apart),
        (16, 49, ["matmul"]),
        (864, 1, ["matmul"]),
    ):
        model = Model()
        with use_model(model):
            a, b = ark.tensor([8, 128, depth], bf16), ark.tensor([8, depth, columns], bf16)
            ark.relu(ark.matmul(a, b))
        fused = fuse_epilogues(model.graph, Context(machine))
        assert [n.type for n in fused.nodes] == types
