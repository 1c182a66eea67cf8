"""Finds the order of ranks in a ring: the circuit whose slowest link is as fast as possible.

A ring is as fast as its slowest hop, so the baseline ring follows the wires if ranks are wired
directly. Called by ark.collective.synthesis if no boxes are known.
"""

from __future__ import annotations

import itertools

from ark.collective.packages import require
from ark.collective.simulate import Routes
from ark.collective.topology import Topology

_MAX_SOLVER_TIME = 2.0  # limit of the solver's deterministic time, per bandwidth
_MOST_RANKS = 64


def widest_ring(topology: Topology) -> list[int]:
    """Returns all rank numbers in the order of a ring, rank 0 first.

    Returns the numeric order if no ranks are wired to each other, if there are more than 64 ranks,
    or if no better circuit is found. The search is exact: for one bandwidth after another, CP-SAT
    looks for a Hamiltonian circuit of links with at least this bandwidth. The limit on its effort
    does not depend on the machine.
    """
    ranks = topology.ranks
    plain = list(range(len(ranks)))
    number = {rank: index for index, rank in enumerate(ranks)}
    capacity = topology.capacities()
    wired = any(src in number and dst in number for src, dst in capacity)
    if not wired or not 3 <= len(ranks) <= _MOST_RANKS:
        return plain
    routes = Routes(topology)
    width = {}
    for one, other in itertools.permutations(ranks, 2):
        route = routes.default(one, other)
        if number.keys().isdisjoint(route[1:-1]):
            hops = itertools.pairwise(route)
            width[number[one], number[other]] = min(capacity[hop] for hop in hops)
    for least in sorted(set(width.values()), reverse=True):
        circuit = _circuit([pair for pair, wide in width.items() if wide >= least], len(ranks))
        if circuit is not None:
            return circuit
    return plain


def _circuit(pairs: list[tuple[int, int]], ranks: int) -> list[int] | None:
    """Returns a circuit through all ranks that uses only these pairs of ranks; None if there is
    none.
    """
    if {src for src, _ in pairs} != set(range(ranks)):
        return None
    cp_model = require("ortools.sat.python.cp_model")
    model = cp_model.CpModel()
    taken = {pair: model.new_bool_var("") for pair in pairs}
    model.add_circuit([(src, dst, var) for (src, dst), var in taken.items()])
    # If several circuits are equally fast, this objective selects one in which consecutive rank
    # numbers are adjacent, so that the result is always the same.
    model.minimize(sum(((dst - src) % ranks) * var for (src, dst), var in taken.items()))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = _MAX_SOLVER_TIME
    if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    following = {src: dst for (src, dst), var in taken.items() if solver.value(var)}
    order = [0]
    while len(order) < ranks:
        order.append(following[order[-1]])
    return order
