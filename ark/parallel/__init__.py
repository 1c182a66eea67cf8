"""Parallel plans: how one logical model is split over ranks, and what moves between them.

`layout` has layouts and the collectives that change them. A room of its own: nothing of the spine
imports it before somebody asks. docs/parallel.md says how it fits together.
"""

from ark.parallel.layout import Layout, change, table

__all__ = ["Layout", "change", "table"]
