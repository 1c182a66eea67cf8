"""Products with the same left operand are placed next to each other, unless an op between them must
run first.
"""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.dtype import bf16, fp32
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.cut_products import cut_products
from ark.lower.rewrite.group_products import group_products

H200 = registry.machine("h200").using("matrix")
CONTEXT = Context(H200, machines=(H200,))


def test_three_products_of_an_input_are_cut_to_fill_the_processors_once() -> None:
    tiles = []
    for count in (1, 3):
        model = Model()
        with use_model(model):
            x = ark.tensor([1024, 768], bf16)
            for _ in range(count):
                ark.exp(ark.linear(x, ark.tensor([768, 768], bf16)))
        graph = group_products(model.graph, CONTEXT)
        assert [n.type for n in graph.nodes] == ["matmul"] * count + ["exp"] * count
        cut = cut_products(graph, CONTEXT)
        sizes = [n.attrs["cut"] for n in cut.nodes if n.type == "matmul"]
        tiles.append(sum(-(-1024 // rows) * -(-768 // columns) for rows, columns, _ in sizes))
    assert tiles[0] > 132 // 3 and tiles[1] <= 132


def test_product_stays_behind_a_copy_into_its_weights() -> None:
    model = Model()
    with use_model(model):
        x, w = ark.tensor([8, 16], fp32, name="x"), ark.tensor([16, 16], fp32, name="w")
        ark.matmul(x, w)
        ark.copy(ark.mul(w, 2.0), w)
        ark.matmul(x, w)
        ark.matmul(x, ark.tensor([16, 16], fp32, name="v"))
    graph = group_products(model.graph, CONTEXT)
    assert [n.type for n in graph.nodes] == ["matmul", "mul", "copy", "matmul", "matmul"]
    assert graph is model.graph
