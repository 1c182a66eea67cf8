"""Predicts the time of a collective program on a topology, by a model in which data flows like a
fluid and shares links fairly.

`simulate` is called by the command line, the page and TACCL's users. `tune_pieces` chooses how
finely chunks are cut. Lower bounds are in `ark.collective.bounds`.
"""

from ark.collective.simulate.engine import simulate, tune_pieces
from ark.collective.simulate.result import Event, SimulationResult
from ark.collective.simulate.routes import Routes

__all__ = [
    "Event",
    "Routes",
    "SimulationResult",
    "simulate",
    "tune_pieces",
]
