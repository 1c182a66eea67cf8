"""Predicts the time of a collective program on a topology. In the model, the data of a put flows
like a fluid, and puts share the bandwidth of a link fairly. `simulate` is called by the command
line, the page and TACCL's users. `tune_pieces` chooses the number of pieces into which chunks are
cut. Lower bounds are in `ark.collective.bounds`.
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
