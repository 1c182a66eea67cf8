"""ForestColl: provably optimal trees for collectives on any topology, in exact arithmetic.

A collective is divided among spanning trees, along which ranks forward or sum data. `optimal`
computes the best rate of a collective and proves it. `trees` and `forest` return spanning trees
that attain this rate, with the trees' paths through switches. `lower` turns the trees into a
program. The steps are in these modules: cuts, optimum, then isomorphic if the network is symmetric,
otherwise switches, packing and drawing, then forest and lower.
"""

from ark.collective.forestcoll.all_reduce import AllReduceOptimum, optimal_all_reduce
from ark.collective.forestcoll.forest import COLLECTIVES, Forest, forest, trees
from ark.collective.forestcoll.lower import lower
from ark.collective.forestcoll.optimum import Optimum, cut_optimum, optimal
from ark.collective.forestcoll.tree import Edge, Tree

__all__ = [
    "COLLECTIVES",
    "AllReduceOptimum",
    "Edge",
    "Forest",
    "Optimum",
    "Tree",
    "cut_optimum",
    "forest",
    "lower",
    "optimal",
    "optimal_all_reduce",
    "trees",
]
