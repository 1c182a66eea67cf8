"""The best choices for all ops of a graph together, under rules that named plans set, by CP-SAT.

One choice a node; a value that is wanted in a state it is not in costs its change once for each
such state. The sum of both is the least there is where the solver proves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.comm.packages import require
from ark.errors import PlanError
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.plans.choices import Choice, Costs, Option, State

SCALE = 1000  # the solver counts in nanoseconds
EFFORT = 30.0  # CP-SAT's deterministic time, about seconds


@dataclass(frozen=True)
class Found:
    """choices: by node id. us: predicted. bytes: of parameters that a rank holds."""

    choices: dict[int, Choice]
    us: float
    parameter_bytes: int
    optimal: bool


def evaluate(nodes: Sequence[Node], chosen: Mapping[int, Option], costs: Costs) -> Found:
    """What given choices cost; `search` minimises the same."""
    us, held = 0.0, 0
    writers = {node.outputs[0].buffer.id: node for node in nodes}
    changes: dict[tuple[int, State], float] = {}
    parameters: dict[tuple[int, State], int] = {}
    for node in nodes:
        option = chosen[node.id]
        us += option.us
        for tensor, want in zip(node.inputs, option.inputs, strict=True):
            writer = writers.get(tensor.buffer.id)
            if writer is not None:
                have = chosen[writer.id].output
                out = writer.outputs[0]
                changes[out.buffer.id, want] = costs.change_us(out, have, want)
            elif tensor.buffer.arena == "parameter":
                parameters[tensor.buffer.id, want] = _bytes(tensor, want, costs)
    us += sum(changes.values())
    held = sum(parameters.values())
    return Found({n.id: chosen[n.id].choice for n in nodes}, us, held, False)


def _bytes(tensor: Tensor, state: State, costs: Costs) -> int:
    return costs.local(tensor, state) * tensor.dtype.itemsize


def search(
    nodes: Sequence[Node],
    allowed: Mapping[int, Sequence[Option]],
    costs: Costs,
    memory_bytes: int | None = None,
) -> Found:
    """The cheapest of the allowed options; PlanError if none fits into the memory.

    memory_bytes: what a rank has for parameters; None: enough.
    """
    cp: Any = require("ortools.sat.python.cp_model", "parallel")
    model = cp.CpModel()
    pick = {n.id: [model.new_bool_var("") for _ in allowed[n.id]] for n in nodes}
    terms = []
    for node in nodes:
        model.add_exactly_one(pick[node.id])
        terms += [
            round(o.us * SCALE) * x for o, x in zip(allowed[node.id], pick[node.id], strict=True)
        ]
    held = []
    for tensor, writer, wants in _values(nodes):
        for state, users in _states(wants, allowed, pick).items():
            wanted = model.new_bool_var("")
            for literals in users:
                model.add(sum(literals) <= wanted)
            if writer is None:
                if tensor.buffer.arena == "parameter":
                    held.append(_bytes(tensor, state, costs) * wanted)
                continue
            prices = [
                round(costs.change_us(writer.outputs[0], option.output, state) * SCALE)
                for option in allowed[writer.id]
            ]
            if any(prices):
                price = model.new_int_var(0, max(prices), "")
                paid = sum(p * x for p, x in zip(prices, pick[writer.id], strict=True))
                model.add(price >= paid).only_enforce_if(wanted)
                terms.append(price)
    if memory_bytes is not None and held:
        model.add(sum(held) <= memory_bytes)
    model.minimize(sum(terms))
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = EFFORT
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        raise PlanError(
            f"no split of the model over a mesh of {'x'.join(map(str, costs.mesh))} ranks keeps "
            f"parameters below {memory_bytes} bytes a rank; use more ranks or give more memory"
        )
    chosen = {
        node.id: next(
            o
            for o, x in zip(allowed[node.id], pick[node.id], strict=True)
            if solver.boolean_value(x)
        )
        for node in nodes
    }
    found = evaluate(nodes, chosen, costs)
    return Found(found.choices, found.us, found.parameter_bytes, status == cp.OPTIMAL)


def _values(
    nodes: Sequence[Node],
) -> list[tuple[Tensor, Node | None, list[tuple[Node, int]]]]:
    """For each buffer that is read: a tensor on it, who writes it, and (reader, operand)."""
    writers = {node.outputs[0].buffer.id: node for node in nodes}
    found: dict[int, tuple[Tensor, Node | None, list[tuple[Node, int]]]] = {}
    for node in nodes:
        for at, tensor in enumerate(node.inputs):
            key = tensor.buffer.id
            found.setdefault(key, (tensor, writers.get(key), []))[2].append((node, at))
    return list(found.values())


def _states(
    wants: Sequence[tuple[Node, int]],
    allowed: Mapping[int, Sequence[Option]],
    pick: Mapping[int, Sequence[Any]],
) -> dict[State, list[list[Any]]]:
    """The states in which readers want a value: for each reader, the literals that ask for it."""
    found: dict[State, list[list[Any]]] = {}
    for node, at in wants:
        by_state: dict[State, list[Any]] = {}
        for option, literal in zip(allowed[node.id], pick[node.id], strict=True):
            by_state.setdefault(option.inputs[at], []).append(literal)
        for state, literals in by_state.items():
            found.setdefault(state, []).append(literals)
    return found
