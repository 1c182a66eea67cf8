"""Layouts of one tensor over devices, and the cheapest collectives that convert one layout to
another.
"""

from ark.parallel.layout.moves import Step
from ark.parallel.layout.paths import change, table
from ark.parallel.layout.types import Layout

__all__ = ["Layout", "Step", "change", "table"]
