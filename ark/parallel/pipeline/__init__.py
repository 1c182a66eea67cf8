"""Schedules of pipelines. A schedule gives the device and the start time of every block of every
micro-batch.
"""

from ark.parallel.pipeline.placement import Block, Placement
from ark.parallel.pipeline.schedule import Entry, Schedule, tessel, verify
from ark.parallel.pipeline.shapes import SHAPES, shape

__all__ = ["SHAPES", "Block", "Entry", "Placement", "Schedule", "shape", "tessel", "verify"]
