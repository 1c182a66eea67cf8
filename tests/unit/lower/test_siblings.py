"""Elementwise ops that do not depend on each other divide the processors among them, so that they
run at the same time.
"""

from __future__ import annotations

import ark
from ark.backend import registry
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.lower.siblings import shares

H200 = registry.get("cuda").machine("h200")
ROWS = (512, 1024)


def graph_of(chain: bool, columns: int = 1024) -> Graph:
    """Four elementwise ops of different inputs. The third and fourth have `columns` columns. chain:
    each reads the result of the op before it.
    """
    model = ark.Model()
    with ark.use_model(model):
        xs = [ark.tensor([512, n], ark.bf16) for n in (1024, 1024, columns, columns)]
        results = [ark.exp(xs[0])]
        for x in xs[1:]:
            results.append(ark.mul(results[-1] if chain else x, x))
        for result in results:
            ark.relu(ark.matmul(result, ark.transpose(result, [1, 0])))
    return model.graph


def tasks_of(graph: Graph) -> list[int]:
    """The number of tasks of each elementwise op, in program order."""
    planned = plan(graph, H200, {"fuse": False})
    listed = [t.op for p in planned.phases for own in p.processors for t in own]
    return [listed.count(op.id) for op in planned.ops if op.kind == "elementwise"][:4]


def test_siblings_together_have_a_task_for_each_processor() -> None:
    tasks = tasks_of(graph_of(chain=False))
    assert max(tasks) - min(tasks) <= 1
    assert 0.9 * H200.processors <= sum(tasks) <= H200.processors


def test_each_op_of_a_chain_uses_all_processors() -> None:
    assert min(tasks_of(graph_of(chain=True))) >= 0.9 * H200.processors


def test_siblings_share_by_size() -> None:
    graph = graph_of(chain=False, columns=3072)
    parts = [s for n, s in zip(graph.nodes, shares(graph.nodes), strict=True) if s < 1.0]
    assert parts == [0.125, 0.125, 0.375, 0.375]


def test_overwriting_an_input_of_another_op_is_a_dependence() -> None:
    model = ark.Model()
    with ark.use_model(model):
        x, y = ark.tensor([*ROWS], ark.bf16), ark.tensor([*ROWS], ark.bf16)
        ark.exp(x)
        ark.copy(y, x)
    assert shares(model.graph.nodes) == [1.0] * len(model.graph.nodes)
