"""Parallel plans: the distribution of one logical model over ranks, and the communication it needs.

`layout` has layouts and the collectives that convert them, `pipeline` schedules of pipelines,
`transform` the primitives that split a graph, `plans` the named plans and the search for the
fastest. ark imports this package only on use. docs/parallel.md has an overview.
"""

from ark.parallel.layout import Layout, change, table
from ark.parallel.pipeline import Placement, shape, tessel
from ark.parallel.plans import autotune, parallelize, pipelined, place_of, spread
from ark.parallel.transform import ParallelGraph, materialise

__all__ = [
    "Layout",
    "ParallelGraph",
    "Placement",
    "autotune",
    "change",
    "materialise",
    "parallelize",
    "pipelined",
    "place_of",
    "shape",
    "spread",
    "table",
    "tessel",
]
