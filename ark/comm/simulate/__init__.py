"""Predicts how long a collective program takes on a topology: fluid flows with fair sharing.

`simulate` is what the command line, the page and TACCL's users call; `tune_pieces` picks how finely
to cut chunks. What a time compares with is in `ark.comm.bounds`.
"""

from ark.comm.simulate.engine import simulate, tune_pieces
from ark.comm.simulate.result import Event, SimulationResult
from ark.comm.simulate.routes import Routes

__all__ = [
    "Event",
    "Routes",
    "SimulationResult",
    "simulate",
    "tune_pieces",
]
