"""Small ops on weights alone run at the beginning of their phase."""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.ir.dtype import bf16
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.weights_first import weights_first
from ark.machine import Machine

H200 = registry.machine("h200").using("matrix")


def types(model: ark.Model, machine: Machine = H200) -> list[str]:
    return [n.type for n in weights_first(model.graph, Context(H200, machines=(machine,))).nodes]


def test_small_ops_on_weights_run_first() -> None:
    model = ark.Model()
    with ark.use_model(model):
        y = ark.exp(ark.softmax(ark.tensor([64, 64], bf16)))
        factors = ark.rsqrt(ark.sigmoid(ark.parameter([64], bf16)))
        y = ark.mul(y, factors)
        ark.matmul(y, ark.transpose(ark.parameter([64, 64], bf16), [1, 0]))
    nodes = [n.type for n in model.graph.nodes]
    assert nodes == ["softmax", "exp", "sigmoid", "rsqrt", "mul", "transpose", "matmul"]
    assert types(model) == ["sigmoid", "rsqrt", "transpose", "softmax", "exp", "mul", "matmul"]


def test_ops_on_written_buffers_and_large_ops_stay() -> None:
    model = ark.Model()
    with ark.use_model(model):
        w = ark.parameter([64, 64], bf16)
        ark.matmul(ark.softmax(ark.tensor([64, 64], bf16)), w)
        ark.copy(ark.tensor([64, 64], bf16), w)
        ark.transpose(w, [1, 0])
        ark.transpose(ark.parameter([8192, 4096], bf16), [1, 0])
    assert types(model) == [n.type for n in model.graph.nodes]
