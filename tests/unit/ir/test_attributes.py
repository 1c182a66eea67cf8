"""Attributes of ops by name: from the user's function to the node, and from there to lowering."""

from __future__ import annotations

import msgspec
import pytest

import ark
from ark.frontend.model import Model, use_model
from ark.ir.attribute_table import ATTRIBUTES
from ark.ir.attributes import AttentionAttributes, ScanAttributes, TopKAttributes
from ark.ir.graph import Node
from ark.lower import registry


def _nodes() -> list[Node]:
    """Returns a node of each op that has an attribute struct and a public function."""
    model = Model()
    with use_model(model):
        x = ark.tensor([8, 64], ark.fp32)
        ids = ark.tensor([8, 64], ark.int32)
        ark.gather(x, ark.tensor([3], ark.int32), 1)
        ark.gather_elements(x, ids, 1)
        ark.scatter_elements(x, ids, x, 1, "add")
        ark.cumsum(x, 0, reverse=True)
        ark.topk(x, 3, largest=False)
        keys = ark.tensor([2, 16, 32], ark.fp32)
        ark.attention(x, keys, keys, window=4)
        position, frequencies = ark.tensor([1], ark.int32), ark.tensor([16], ark.fp32)
        ark.rotary_embedding(x, position, frequencies, interleaved=True)
    return [node for node in model.graph.nodes if not node.virtual]


def test_node_gives_its_attributes_by_name() -> None:
    nodes = {node.type: node for node in _nodes()}
    assert nodes["topk"].read(TopKAttributes) == TopKAttributes(k=3, least=True)
    expected = ScanAttributes(axis=0, function="add", exclusive=False, reverse=True)
    assert nodes["scan"].read(ScanAttributes) == expected
    attention = nodes["attention"].read(AttentionAttributes)
    assert (attention.heads, attention.head_dim, attention.window) == (2, 32, 4)
    assert not (attention.placed or attention.plain)


def test_node_holds_the_text_of_its_struct() -> None:
    nodes = _nodes()
    assert {node.type for node in nodes} <= set(ATTRIBUTES)
    for node in nodes:
        assert node.read(ATTRIBUTES[node.type]).to_node() == dict(node.attrs)


def test_unknown_attributes_are_refused() -> None:
    for node in _nodes():
        with pytest.raises(msgspec.ValidationError, match="no_such"):
            ATTRIBUTES[node.type].from_node({**node.attrs, "no_such": 1})


def test_attributes_are_of_registered_ops() -> None:
    assert set(ATTRIBUTES) <= set(registry.names())
