"""Parallel plans: how one logical model is split over ranks, and what moves between them.

`layout` has layouts and the collectives that change them, `pipeline` schedules of pipelines,
`transform` the primitives that split a graph, `plans` what has a name and the search for the best.
A room of its own: nothing of the spine imports it before somebody asks. docs/parallel.md says how
it fits together.
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
