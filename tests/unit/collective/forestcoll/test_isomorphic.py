"""Large networks, whose trees are images of one tree under symmetries, and refused networks."""

import importlib
from dataclasses import replace

import pytest

from ark.collective.forestcoll import forest, optimal
from ark.collective.forestcoll.isomorphic import draw
from ark.collective.forestcoll.network import network
from ark.collective.forestcoll.symmetry import find_symmetry
from ark.collective.topology import named
from ark.errors import UnsupportedError
from tests.slow import slow
from tests.unit.collective.networks import verify


@slow
def test_more_than_512_ranks():
    result = forest(named("h100x66"))  # forest() checks the trees
    assert result.height == 2 and len({tree.root for tree in result.gathering}) == 528


def _without(topology, src, dst):
    """Returns the network without a link, in both directions."""
    alive = tuple(link for link in topology.links if {link.src, link.dst} != {src, dst})
    assert len(alive) == len(topology.links) - 2
    return replace(topology, links=alive)


@pytest.mark.parametrize(
    ("topology", "height"),
    [
        (named("fattree4x4x4"), 3),
        (_without(named("fattree4x4x4"), "leaf3", "agg0.1"), 3),
        (_without(named("torus6x6"), "g0", "g1"), 6),
        (named("torus4x4x4"), 6),
        (named("hypercube6"), 6),
    ],
    ids=["fat tree", "fat tree, dead link", "torus, dead link", "torus", "cube"],
)
def test_trees_are_drawn_without_packing(topology, height):
    net, best = network(topology), optimal(topology)
    base = draw(net, find_symmetry(net), best.scale, best.k)
    assert base is not None
    result = forest(topology)
    assert result.height == height == max(tree.height for tree in base)
    verify(topology, result)


@slow
def test_too_large_networks_are_refused(monkeypatch):
    with pytest.raises(UnsupportedError, match="would be more than 2097152"):
        forest(named("h100x512"))
    module = importlib.import_module("ark.collective.forestcoll.forest")
    monkeypatch.setattr(module, "_MOST_PACKED", 200)
    with pytest.raises(UnsupportedError, match="8 ranks and 32 links; its trees are not symmetric"):
        forest(named("dgx1v"))
    assert forest(named("mi300x")).height == 1  # height 1 is constructed directly, without packing
