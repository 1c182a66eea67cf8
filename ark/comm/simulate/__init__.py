"""Predicts how long a collective program takes on a topology: fluid flows with fair sharing.

`simulate` is what the command line, the page and TACCL's users call; `tune_pieces` picks how finely
to cut chunks; `bound_us` turns an optimum 1/x* into a time to compare with.
"""

from ark.comm.simulate.engine import CostModel, simulate, tune_pieces
from ark.comm.simulate.result import Event, SimulationResult, bound_us
from ark.comm.simulate.routes import Routes, boxes_of

__all__ = [
    "CostModel",
    "Event",
    "Routes",
    "SimulationResult",
    "bound_us",
    "boxes_of",
    "simulate",
    "tune_pieces",
]
