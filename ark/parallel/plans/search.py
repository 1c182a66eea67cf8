"""Searches for the best choices for all ops of a graph together, under the rules of named plans,
with CP-SAT (a constraint solver).

A choice states how an op is split. There is one choice per node, or one for all isomorphic nodes
(the same op in equal layers). If readers need a value in other layouts than the one in which it is
computed, the value is converted once for each of these layouts, and so is its gradient. The cost
includes these conversions. The result is proven optimal if the solver finishes. Called by
ark.parallel.plans.splits and ark.parallel.plans.parallelize.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ark.collective.packages import require
from ark.errors import PlanError
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.plans.choices import Choice, Costs, Move, Option, State, of_gradient

NS_PER_US = 1000  # times in the solver are whole nanoseconds
Kept = Sequence[tuple[int, int | None]]
"""The users of a buffer that keeps its contents between iterations. A user is (node id, operand
index) for a node that reads the buffer, and (node id, None) for a node that writes it.
"""
SOLVER_TIME = 30.0  # CP-SAT's deterministic time, about seconds


@dataclass(frozen=True)
class Solution:
    """The choices by node id. us: the predicted time. bytes: the bytes of parameters on a rank."""

    choices: dict[int, Choice]
    us: float
    parameter_bytes: int
    optimal: bool


@dataclass(frozen=True)
class Change:
    """A conversion of a value's layout between the op that writes it and an op that reads it.
    reader: the first op that reads the value in the new layout. us: the time of all collectives of
    the conversion.
    """

    tensor: Tensor
    writer: int
    reader: int
    have: State
    want: State
    backward: bool
    moves: tuple[Move, ...]

    @property
    def us(self) -> float:
        return sum(move.us for move in self.moves)


@dataclass(frozen=True)
class Memory:
    """The memory of a rank in bytes, and how many bytes are needed for each byte of parameters and
    for each byte of saved results.
    """

    bytes: int
    parameters: float = 1.0
    saved: float = 0.0


def changes(nodes: Sequence[Node], chosen: Mapping[int, Option], costs: Costs) -> list[Change]:
    """The values whose layout must be changed between the op that writes them and one that reads
    them, if the ops are split as chosen; in the order of the readers.
    """
    writers = {t.buffer.id: (node, t) for node in nodes for t in node.outputs}
    by_value: dict[tuple[int, State, bool], Change] = {}
    for node in nodes:
        option = chosen[node.id]
        for at, tensor in enumerate(node.inputs):
            writer, out = writers.get(tensor.buffer.id, (None, tensor))
            if writer is None or writer.id >= node.id:
                continue
            have = chosen[writer.id].output
            want = option.inputs[at]
            moves = tuple(costs.moves(out, have, want))
            key = (out.buffer.id, want, False)
            by_value.setdefault(key, Change(out, writer.id, node.id, have, want, False, moves))
            if costs.training:
                grad, target = option.grads[at], of_gradient(have)
                moves = tuple(costs.moves(out, grad, target))
                key = (out.buffer.id, grad, True)
                by_value.setdefault(key, Change(out, writer.id, node.id, grad, target, True, moves))
    return [change for change in by_value.values() if change.moves]


def evaluate(nodes: Sequence[Node], chosen: Mapping[int, Option], costs: Costs) -> Solution:
    """The predicted time of given choices, which `search` minimises, and their memory."""
    parameters: dict[tuple[int, State], int] = {}
    for node in nodes:
        for tensor, want in zip(node.inputs, chosen[node.id].inputs, strict=True):
            if tensor.buffer.arena == "parameter":
                parameters[tensor.buffer.id, want] = _bytes(tensor, want, costs)
    us = passes(costs) * sum(chosen[node.id].us for node in nodes)
    us += sum(change.us for change in changes(nodes, chosen, costs))
    held = sum(parameters.values())
    return Solution({n.id: chosen[n.id].choice for n in nodes}, us, held, False)


def passes(costs: Costs) -> float:
    """The factor by which an op's time is multiplied. It is 3 in training, because an op's
    gradients cost twice the forward op, and 1 otherwise.
    """
    return 3.0 if costs.training else 1.0


def _bytes(tensor: Tensor, state: State, costs: Costs) -> int:
    return costs.local(tensor, state) * tensor.dtype.itemsize


def search(
    nodes: Sequence[Node],
    allowed: Mapping[int, Sequence[Option]],
    costs: Costs,
    memory: Memory | None = None,
    shared: Mapping[int, int] | None = None,
    kept: Sequence[Kept] = (),
) -> Solution:
    """The cheapest combination of the allowed options. Raises PlanError if none fits into memory.

    shared: for each node id, the node whose choice it has; empty if each node has its own choice.
    kept: readers and writers of memory that ops update in place; all of them must use it in one
    state.
    """
    same = {n.id: (shared or {}).get(n.id, n.id) for n in nodes}
    count = Counter(same.values())
    cp: Any = require("ortools.sat.python.cp_model", "parallel")
    model = cp.CpModel()
    pick = {i: [model.new_bool_var("") for _ in allowed[i]] for i in count}
    terms, held = [], []
    for i, number in count.items():
        model.add_exactly_one(pick[i])
        for option, x in zip(allowed[i], pick[i], strict=True):
            terms.append(round(option.us * passes(costs) * NS_PER_US) * number * x)
            if memory and memory.saved:
                held.append(round(option.saved * memory.saved) * number * x)
    for (wants, writer), (tensor, number) in _values(nodes, same).items():
        for state, users in _states(wants, allowed, pick, _wanted).items():
            parameter = writer is None and tensor.buffer.arena == "parameter"
            if writer is None and not parameter:
                continue
            wanted = _any(model, users)
            if parameter:
                if memory:
                    bytes_ = _bytes(tensor, state, costs) * memory.parameters
                    held.append(round(bytes_) * number * wanted)
                continue
            assert writer is not None
            prices = [costs.change_us(tensor, o.output, state) for o in allowed[writer]]
            terms += _price(model, prices, pick[writer], wanted, number)
        if writer is None or not costs.training:
            continue
        for state, users in _states(wants, allowed, pick, _gradient).items():
            prices = [
                costs.change_us(tensor, state, of_gradient(o.output)) for o in allowed[writer]
            ]
            if any(prices):
                terms += _price(model, prices, pick[writer], _any(model, users), number)
    for uses in kept:
        _in_one_state(model, [(same[n], at) for n, at in uses], allowed, pick)
    if memory and held:
        model.add(sum(held) <= memory.bytes)
    model.minimize(sum(terms))
    solver = cp.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    # Level 2 makes the solver use all of its cutting planes. Its linear relaxation then nearly
    # determines the choices. With fewer cutting planes, proofs of optimality are slow.
    solver.parameters.linearization_level = 2
    solver.parameters.max_deterministic_time = SOLVER_TIME
    status = solver.solve(model)
    if status not in (cp.OPTIMAL, cp.FEASIBLE):
        mesh = "x".join(map(str, costs.mesh))
        if memory is None:
            raise PlanError(
                "the plan splits memory that survives an iteration differently for its writer "
                f"and its reader, over a mesh of {mesh} ranks; choose another plan"
            )
        raise PlanError(
            f"no split of the model over a mesh of {mesh} ranks keeps parameters below "
            f"{memory.bytes} bytes a rank; use more ranks or give more memory"
        )
    chosen = {
        i: next(o for o, x in zip(allowed[i], pick[i], strict=True) if solver.boolean_value(x))
        for i in count
    }
    result = evaluate(nodes, {n.id: chosen[same[n.id]] for n in nodes}, costs)
    return Solution(result.choices, result.us, result.parameter_bytes, status == cp.OPTIMAL)


def _in_one_state(
    model: Any,
    users: Kept,
    allowed: Mapping[int, Sequence[Option]],
    pick: Mapping[int, Sequence[Any]],
) -> None:
    """Adds the constraint that all readers and writers use the memory in the same state."""
    by_state: list[dict[State, list[Any]]] = []
    for node, at in users:
        of_state: dict[State, list[Any]] = {}
        for option, literal in zip(allowed[node], pick[node], strict=True):
            state = option.output if at is None else option.inputs[at]
            of_state.setdefault(state, []).append(literal)
        by_state.append(of_state)
    for state in sorted(set().union(*by_state)):
        for of_state in by_state[1:]:
            model.add(sum(by_state[0].get(state, ())) == sum(of_state.get(state, ())))


def _any(model: Any, users: Sequence[Sequence[Any]]) -> Any:
    """A variable of the solver that is true if some reader has chosen one of its options in
    `users`.
    """
    wanted = model.new_bool_var("")
    for literals in users:
        model.add(sum(literals) <= wanted)
    return wanted


def _price(
    model: Any, prices: Sequence[float], pick: Sequence[Any], wanted: Any, number: int
) -> list[Any]:
    """Terms of the cost function for one conversion. The conversion costs nothing unless it is
    needed (`wanted`). prices: its cost for each option of the op that writes the value. pick: the
    solver's variables that select one of these options.
    """
    whole = [round(p * NS_PER_US) for p in prices]
    if not any(whole):
        return []
    price = model.new_int_var(0, max(whole), "")
    paid = sum(p * x for p, x in zip(whole, pick, strict=True))
    model.add(price >= paid).only_enforce_if(wanted)
    return [number * price]


Wants = tuple[tuple[int, int], ...]


def _values(
    nodes: Sequence[Node], same: Mapping[int, int]
) -> dict[tuple[Wants, int | None], tuple[Tensor, int]]:
    """Values with the same writer and the same kinds of readers cost the same. So values are
    grouped by their readers (node class and operand) and their writer. For each group, returns one
    of its tensors and the number of its values.
    """
    writers = {t.buffer.id: (node, t) for node in nodes for t in node.outputs}
    readers: dict[int, tuple[Tensor, Node | None, list[tuple[int, int]]]] = {}
    for node in nodes:
        for at, tensor in enumerate(node.inputs):
            writer, shown = writers.get(tensor.buffer.id, (None, tensor))
            if writer is not None and writer.id >= node.id:
                # If this node or a later one writes the tensor, the node reads the contents from
                # before the write, for example those of the previous iteration.
                writer, shown = None, tensor
            entry = readers.setdefault(tensor.buffer.id, (shown, writer, []))
            entry[2].append((same[node.id], at))
    values: dict[tuple[Wants, int | None], tuple[Tensor, int]] = {}
    for tensor, writer, wants in readers.values():
        key = (tuple(dict.fromkeys(wants)), None if writer is None else same[writer.id])
        values[key] = (tensor, values.get(key, (tensor, 0))[1] + 1)
    return values


def _wanted(option: Option, at: int) -> State:
    return option.inputs[at]


def _gradient(option: Option, at: int) -> State:
    return option.grads[at]


def _states(
    wants: Wants,
    allowed: Mapping[int, Sequence[Option]],
    pick: Mapping[int, Sequence[Any]],
    state_of: Callable[[Option, int], State],
) -> dict[State, list[list[Any]]]:
    """For each state (layout), the readers that may need the value in this state. A reader is given
    as the solver's variables of its options that need the state.
    """
    wanted: dict[State, list[list[Any]]] = {}
    for i, at in wants:
        by_state: dict[State, list[Any]] = {}
        for option, literal in zip(allowed[i], pick[i], strict=True):
            by_state.setdefault(state_of(option, at), []).append(literal)
        for state, literals in by_state.items():
            wanted.setdefault(state, []).append(literals)
    return wanted
