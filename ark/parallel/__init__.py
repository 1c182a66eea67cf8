"""Parallel plans: how one logical model is split over ranks, and what moves between them.

`layout` has layouts and the collectives that change them, `pipeline` schedules of pipelines. A room
of its own: nothing of the spine imports it before somebody asks. docs/parallel.md says how it fits
together.
"""

from ark.parallel.layout import Layout, change, table
from ark.parallel.pipeline import Placement, shape, tessel

__all__ = ["Layout", "Placement", "change", "shape", "table", "tessel"]
