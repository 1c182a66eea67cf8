"""A topology in the form of arrays, which is the input of every step of ForestColl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ark.collective.forestcoll.cuts import Ints, RootedCuts
from ark.collective.topology import Topology
from ark.errors import InvalidUsageError, UnsupportedError


@dataclass(frozen=True)
class Network:
    """A topology as arrays. Nodes are numbered, ranks first. Links are numbered; parallel links are
    added up.
    """

    topology: Topology
    tails: Ints
    heads: Ints
    bandwidth: tuple[Fraction, ...]
    demand: Ints

    @property
    def ranks(self) -> int:
        """Returns the number of ranks. Nodes with lower numbers are ranks."""
        return len(self.topology.ranks)

    def capacity(self, scale: Fraction) -> Ints:
        """Returns floor(scale * bandwidth) for every link."""
        try:
            return np.array([math.floor(scale * each) for each in self.bandwidth], dtype=np.int64)
        except OverflowError as error:
            raise UnsupportedError(
                f"the bandwidths of {self.topology.name} differ by too much to be solved exactly "
                "(beyond 2^63 in common units); round them"
            ) from error

    def cuts(self) -> RootedCuts:
        """Returns a new solver of maximum flows (RootedCuts) with the links of this network."""
        return RootedCuts(len(self.topology.nodes), self.ranks, self.tails, self.heads)


def network(topology: Topology, roots: Mapping[str, int] | None = None) -> Network:
    """Returns the arrays of a valid topology. `roots` has the amount that each root sends, by
    default 1 for every rank.

    Raises TopologyError if the topology is not valid, and InvalidUsageError for fewer than two
    ranks.
    """
    topology.validate()
    if len(topology.ranks) < 2:
        raise InvalidUsageError(f"{topology.name} has one rank; a collective needs at least two.")
    if roots is None:
        roots = dict.fromkeys(topology.ranks, 1)
    unknown = [root for root in roots if root not in topology.ranks]
    if unknown or not roots or min(roots.values()) < 0 or not any(roots.values()):
        raise InvalidUsageError(
            f"roots {dict(roots)} of {topology.name}; expected ids of its ranks with weights of 0 "
            "or more, one of them above 0."
        )
    number = {node: index for index, node in enumerate(topology.nodes)}
    capacities = topology.capacities()
    return Network(
        topology,
        np.array([number[src] for src, _ in capacities], dtype=np.int64),
        np.array([number[dst] for _, dst in capacities], dtype=np.int64),
        tuple(capacities.values()),
        np.array([roots.get(rank, 0) for rank in topology.ranks], dtype=np.int64),
    )
