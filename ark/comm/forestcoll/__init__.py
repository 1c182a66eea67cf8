"""ForestColl: provably optimal trees for collectives on any topology, in exact arithmetic.

`optimal` says how fast a collective can be and proves it; `trees` and `forest` give the spanning
trees that attain it, with their paths through switches; `lower` turns them into a program. Work
passes through the modules in this order: cuts, optimum, switches, packing (with symmetry and
drawing), forest, lower.
"""

from ark.comm.forestcoll.forest import COLLECTIVES, Edge, Forest, Tree, forest, trees
from ark.comm.forestcoll.lower import lower
from ark.comm.forestcoll.optimum import Optimum, optimal

__all__ = [
    "COLLECTIVES",
    "Edge",
    "Forest",
    "Optimum",
    "Tree",
    "forest",
    "lower",
    "optimal",
    "trees",
]
