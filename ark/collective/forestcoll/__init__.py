"""ForestColl: provably optimal trees for collectives on any topology, in exact arithmetic.

`optimal` computes the best rate of a collective and proves it. `trees` and `forest` return spanning
trees that attain it, with their paths through switches; `lower` turns these into a program. The
modules work in this order: cuts, optimum, then isomorphic (with symmetry) or else switches and
packing (with drawing), then forest and lower.
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
