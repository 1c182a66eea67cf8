"""Tables of the nodes that write and read tensors: compared with counts by hand, and rebuilt when
nodes change.
"""

from __future__ import annotations

import re
from pathlib import Path

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.ir.graph_view import GraphView, WritesSoFar

REWRITES = Path(__file__).parents[3] / "ark/lower/rewrite"
# Matches code that builds such a table by hand: a comprehension over all nodes of a graph whose
# keys are tensors or buffers.
BY_HAND = re.compile(r"(Counter\(|\{)[^\n]*for n(ode)? in (graph\.|self\.graph\.)?nodes for t in")


def _graph() -> Graph:
    """Returns a graph of x + 1, which is read by a product with itself and by an exponential that
    is written into x.
    """
    model = Model()
    with use_model(model):
        x = ark.tensor([4, 4], ark.fp32)
        y = ark.add(x, 1.0)
        ark.mul(y, y)
        ark.exp(y, output=x)
    return model.graph


def test_view_has_producer_and_readers_of_each_tensor() -> None:
    graph = _graph()
    view, work = graph.view, [n for n in graph.nodes if not n.virtual]
    add, mul, exp = work
    y, x = add.outputs[0], add.inputs[0]
    assert view.makers[y.id] is add
    assert [n.type for n in view.readers[y.id]] == [mul.type, mul.type, exp.type]
    assert view.uses[y.id] == view.reads[y.buffer.id] == 3
    assert view.reading[y.buffer.id] == {mul.id, exp.id}
    assert view.touching[y.buffer.id] == {add.id, mul.id, exp.id}
    assert view.touches[y.buffer.id] == 4
    assert view.writers[x.buffer.id][-1] is exp
    assert {x.buffer.id, y.buffer.id} <= view.written
    assert [graph.nodes[view.places[n.id]] for n in work] == work
    assert list(view.working.nodes) == work


def test_view_is_kept_until_nodes_change() -> None:
    graph = _graph()
    view = graph.view
    assert graph.view is view
    last = graph.nodes[-1]
    graph.nodes[-1] = graph.nodes[0]
    assert graph.view is not view
    graph.nodes[-1] = last
    shorter = graph.with_nodes(graph.nodes[:-1])
    assert last.id not in shorter.view.places
    assert last.id in graph.view.places


def test_writes_so_far() -> None:
    graph = _graph()
    written = WritesSoFar()
    add, _, exp = (n for n in graph.nodes if not n.virtual)
    x = add.inputs[0]
    assert written.at(x) == -1
    for place, node in enumerate(graph.nodes):
        written.add(place, node)
    last = GraphView(graph.nodes).places[exp.id]
    assert written.at(x) == last
    assert written.behind(last - 1, [x])
    assert not written.behind(last, [x])


def test_no_pass_builds_such_tables_itself() -> None:
    tables = [
        f"{path.name}:{number}"
        for path in sorted(REWRITES.glob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BY_HAND.search(line)
    ]
    assert not tables, "ask Graph.view"
