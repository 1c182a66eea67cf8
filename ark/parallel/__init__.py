"""Parallel plans: they distribute the model of one device over several ranks and add the
communication that this needs.

`layout` has layouts of tensors and the collectives that convert them. `pipeline` has schedules of
pipelines. `transform` has the primitives that split a graph. `plans` has the named plans and the
search for the fastest one. ark imports this package only when it is used. docs/parallel.md has an
overview.
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
