"""The event loop of the simulator. It determines which puts are in flight, at which rate, and which
operations may start when they end.

The cost model is alpha-beta with congestion. A put flows over all links of its route at the same
time, as a fluid. Its rate is its max-min fair share of the links (and of node ports, if these are
limited). Its data is visible at the peer one route latency after its last byte has left. Puts from
one sender to one receiver over one route run one after the other. Puts of pieces with lower numbers
are sent first; puts of one piece are sent in the order in which they became ready. All other puts
flow concurrently. Puts that a switch can merge (`in_network`) wait for each other and then flow as
one. Local operations take no time, unless the cost model has a rate for them.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools

import numpy as np

from ark.collective.programs import REDUCTIONS, CollectiveProgram, Kind, Operation, Role
from ark.collective.simulate.fair import fair_rates
from ark.collective.simulate.in_network import Hop, crossings, hops, joined
from ark.collective.simulate.result import Event, SimulationResult
from ark.collective.simulate.routes import routes_of
from ark.collective.topology import CostModel, Protocol, Topology
from ark.errors import InvalidUsageError, PlanError

DOTS_BYTES = 24.0
MOST_INSTANCES = 1 << 22
_MAX_ROUNDING_FRACTION = 1e-9  # tolerated rounding error, as a fraction of a put's bytes


def simulate(
    program: CollectiveProgram,
    topology: Topology,
    size_bytes: int,
    model: CostModel | None = None,
) -> SimulationResult:
    """Predicts the time of `program` on `topology` for data of `size_bytes` (M in the papers).

    M is the output of an all-gather, the input of a reduce-scatter, the vector of an all-reduce,
    broadcast or reduce, and what one rank sends and keeps in an all-to-all. Costs are those of
    `model`; without it the topology's own, if it has any.

    Raises:
        InvalidUsageError: sizes do not fit. ModelError: a put has no route. PlanError: a deadlock.
    """
    if program.ranks != len(topology.ranks):
        raise InvalidUsageError(
            f"The program {program.name} is for {program.ranks} ranks, but the topology "
            f"{topology.name} has {len(topology.ranks)}; make the program for this topology."
        )
    if size_bytes < 1:
        raise InvalidUsageError(f"The data size is {size_bytes} bytes; it must be at least 1.")
    instances = program.pieces * sum(len(ops) for ops in program.operations)
    if instances > MOST_INSTANCES:
        raise InvalidUsageError(
            f"The program {program.name} in {program.pieces} pieces has {instances} operations; at "
            f"most {MOST_INSTANCES} are simulated: use fewer pieces."
        )
    costs = model or topology.costs or CostModel()
    return _Engine(program, topology, size_bytes, costs).run()


def tune_pieces(
    program: CollectiveProgram,
    topology: Topology,
    size_bytes: int,
    most_operations: int = 32000,
) -> tuple[CollectiveProgram, SimulationResult]:
    """Finds the number of pieces, among 1, 2, 4, ... 256, for which the program is fastest. Returns
    the program with this number of pieces, and its simulation.

    The search stops when twice as many pieces save less than 0.5%, or when the program would exceed
    `most_operations`. Programs that reduce whole tensors are not cut.
    """
    best = (program, simulate(program, topology, size_bytes))
    if program.reduction is not None and not REDUCTIONS[program.reduction].elementwise:
        return best
    operations = sum(len(ops) for ops in program.operations)
    pieces = 2 * program.pieces
    while program.pieces < pieces <= 256 and pieces * operations <= most_operations:
        finer = dataclasses.replace(program, pieces=pieces)
        result = simulate(finer, topology, size_bytes)
        if result.time_us >= best[1].time_us * 0.995:
            break
        best = (finer, result)
        pieces *= 2
    return best


class _Engine:
    """The state of one simulation. The program runs once for each piece of the chunks. An instance
    is an operation applied to one piece; its number is piece * operations + operation.
    """

    def __init__(
        self, program: CollectiveProgram, topology: Topology, size_bytes: int, model: CostModel
    ) -> None:
        self.program, self.topology, self.size, self.model = program, topology, size_bytes, model
        self.routes = routes_of(topology)
        self.refs = program.refs()
        number = {ref: i for i, ref in enumerate(self.refs)}
        self.ops = [program.op(ref) for ref in self.refs]
        self.followers: list[list[int]] = [[] for _ in self.refs]
        for i, op in enumerate(self.ops):
            for dep in sorted(set(op.deps)):
                self.followers[number[dep]].append(i)
        self.missing = [len(set(op.deps)) for op in self.ops] * program.pieces
        self.bytes = [self._bytes(op) for op in self.ops]
        self.members = [[i] for i in range(len(self.ops))]  # by leader: operations in its flow
        self.leader = list(range(len(self.ops)))
        self._make_channels()
        self.absent = [len(members) for members in self.members] * program.pieces
        self.now = 0.0
        self.start = [0.0] * len(self.missing)
        self.left_at = [0.0] * len(self.missing)
        self.end = [-1.0] * len(self.missing)
        self.heap: list[tuple[float, int, bool]] = []  # time, instance, True if a put starts

    def _bytes(self, op: Operation) -> float:
        if self.program.buffer_by_name[op.dst.buffer].role is Role.DOTS:
            return DOTS_BYTES
        return op.dst.count * self.program.chunk_bytes(self.size) / self.program.pieces

    def _make_channels(self) -> None:
        links = {pair: i for i, pair in enumerate(self.routes.capacity)}
        capacity = [float(c) * 1e3 for c in self.routes.capacity.values()]
        ports: dict[tuple[str, str], int] = {}
        for node, limit in sorted(self.model.ports.items()):
            if node not in self.topology.nodes or limit <= 0:
                raise InvalidUsageError(
                    f"The port limit of {node!r} is {limit} GB/s; expected a node of the "
                    "topology and a bandwidth above 0."
                )
            for way in ("in", "out"):
                ports[node, way] = len(capacity)
                capacity.append(float(limit) * 1e3)
        self.capacity = np.array(capacity)
        self.route_of = [
            self.routes.of_put(self.program, ref) if op.kind is Kind.PUT else ()
            for ref, op in zip(self.refs, self.ops, strict=True)
        ]
        flows = self._flows()
        names: dict[object, int] = {}
        self.channel_of: list[int] = []
        crossed: list[list[int]] = []
        for i, (ref, op) in enumerate(zip(self.refs, self.ops, strict=True)):
            if op.kind is not Kind.PUT:
                self.channel_of.append(-1)
                continue
            flow = flows.get(self.leader[i])
            key = (ref.rank, self.route_of[i]) if flow is None else self.leader[i]
            if key not in names:
                names[key] = len(names)
                used = []
                for hop, times in (hops(self.route_of[i]) if flow is None else flow).items():
                    used += [links[hop]] * times
                    for port in ((hop[0], "out"), (hop[1], "in")):
                        used += [ports[port]] * times if port in ports else []
                crossed.append(used)
            self.channel_of.append(names[key])
        self.flows = flows
        self.protocol_of = [
            self._protocol(i) if op.kind is Kind.PUT else None for i, op in enumerate(self.ops)
        ]
        self.channels = len(crossed)
        self.entry_channel = np.array([c for c, used in enumerate(crossed) for _ in used], int)
        self.entry_link = np.array([i for used in crossed for i in used], int)
        self.queue: list[list[tuple[int, float, int]]] = [[] for _ in crossed]
        self.current = [-1] * self.channels
        self.active = np.zeros(self.channels, bool)
        self.left = np.zeros(self.channels)
        self.sent = np.zeros(self.channels)  # bytes sent of the put in flight
        self.rate = np.zeros(self.channels)
        self.stale = False

    def _flows(self) -> dict[int, dict[Hop, int]]:
        """Merges puts that switches can combine. Returns, for each leader (the put that represents
        a merged flow), the links of its flow.
        """
        number = {ref: i for i, ref in enumerate(self.refs)}
        flows = {}
        for group in joined(self.program, self.topology):
            members = [number[ref] for ref in group]
            copying = len({ref.rank for ref in group}) == 1
            capable = self.topology.multicast if copying else self.topology.reduces
            routes = [self.route_of[i] for i in members]
            flow = crossings(routes, copying, frozenset(capable))
            if sum(flow.values()) < sum(len(route) - 1 for route in routes):
                flows[members[0]] = flow
                self.members[members[0]] = members
                for i in members:
                    self.leader[i] = members[0]
        return flows

    def _protocol(self, i: int) -> Protocol:
        narrowest = min(self.routes.capacity[hop] for hop in itertools.pairwise(self.route_of[i]))
        return self.model.protocol(self.bytes[i], float(narrowest))

    def _wire_bytes(self, i: int) -> float:
        protocol = self.protocol_of[i]
        return self.bytes[i] if protocol is None else self.bytes[i] / protocol.share

    def run(self) -> SimulationResult:
        for instance, count in enumerate(self.missing):
            if count == 0:
                self._ready(instance)
        while self.heap or self.active.any():
            self._advance()
        if min(self.end, default=0.0) < 0:
            stuck = self.refs[self.end.index(-1.0) % len(self.refs)]
            raise PlanError(
                f"The program {self.program.name} deadlocks: rank {stuck.rank} operation "
                f"{stuck.position} never starts."
            )
        return self._result()

    def _advance(self) -> None:
        if self.stale:
            self._share()
        flowing = np.flatnonzero(self.active)
        soonest = self.heap[0][0] if self.heap else np.inf
        if len(flowing):
            ends = self.now + self.left[flowing] / self.rate[flowing]
            soonest = min(soonest, float(ends.min()))
            self.left[flowing] -= self.rate[flowing] * (soonest - self.now)
        self.now = soonest
        rounding = _MAX_ROUNDING_FRACTION * self.sent[flowing] + self.rate[flowing] * 1e-9
        for channel in flowing[self.left[flowing] <= rounding].tolist():
            self._leave(channel, self.current[channel])
        while self.heap and self.heap[0][0] <= self.now + 1e-9:
            _, instance, flows = heapq.heappop(self.heap)
            if flows:
                self._flow(instance)
            else:
                self._complete(instance)

    def _share(self) -> None:
        flowing = np.flatnonzero(self.active)
        place = np.full(self.channels, -1)
        place[flowing] = np.arange(len(flowing))
        entries = self.active[self.entry_channel]
        self.rate[flowing] = fair_rates(
            place[self.entry_channel[entries]],
            self.entry_link[entries],
            self.capacity,
            len(flowing),
        )
        self.stale = False

    def _ready(self, instance: int) -> None:
        channel = self.channel_of[instance % len(self.ops)]
        if channel < 0:
            op = self.ops[instance % len(self.ops)]
            self.start[instance] = self.now
            duration = 0.0
            if self.model.local_gbps:
                moved = self.bytes[instance % len(self.ops)] * (len(op.srcs) + 1)
                duration = moved / (self.model.local_gbps * 1e3)
            heapq.heappush(self.heap, (self.now + duration, instance, False))
            return
        piece, operation = divmod(instance, len(self.ops))
        instance += self.leader[operation] - operation
        self.absent[instance] -= 1
        if self.absent[instance]:
            return
        heapq.heappush(self.queue[channel], (piece, self.now, instance))
        if self.current[channel] < 0:
            self._begin(channel)

    def _begin(self, channel: int) -> None:
        *_, instance = heapq.heappop(self.queue[channel])
        self.current[channel] = instance
        for member in self._members(instance):
            self.start[member] = self.now
        if self.model.put_overhead_us > 0:
            heapq.heappush(self.heap, (self.now + self.model.put_overhead_us, instance, True))
        else:
            self._flow(instance)

    def _flow(self, instance: int) -> None:
        channel = self.channel_of[instance % len(self.ops)]
        self.left[channel] = self.sent[channel] = self._wire_bytes(instance % len(self.ops))
        if not self.active[channel]:
            self.active[channel] = True
            self.stale = True

    def _leave(self, channel: int, instance: int) -> None:
        for member in self._members(instance):
            operation = member % len(self.ops)
            protocol = self.protocol_of[operation]
            latency = self.routes.latency_us(self.route_of[operation])
            latency += 0.0 if protocol is None else protocol.latency_us
            self.left_at[member] = self.now
            heapq.heappush(self.heap, (self.now + latency, member, False))
        self.current[channel] = -1
        if self.queue[channel]:
            if self.model.put_overhead_us > 0:
                self.active[channel] = False
                self.stale = True
            self._begin(channel)
        else:
            self.active[channel] = False
            self.stale = True

    def _members(self, instance: int) -> list[int]:
        """The instances whose data flows together with this instance. A switch merges their puts
        into one flow, and `instance` is the leader that represents it.
        """
        operation = instance % len(self.ops)
        return [instance - operation + member for member in self.members[operation]]

    def _complete(self, instance: int) -> None:
        self.end[instance] = self.now
        operation = instance % len(self.ops)
        if self.channel_of[operation] < 0:
            self.left_at[instance] = self.now
        for follower in self.followers[operation]:
            waiting = instance - operation + follower
            self.missing[waiting] -= 1
            if self.missing[waiting] == 0:
                self._ready(waiting)

    def _result(self) -> SimulationResult:
        carried = dict.fromkeys(self.routes.capacity, 0.0)
        for op, route in enumerate(self.route_of):
            if self.channel_of[op] >= 0 and self.leader[op] == op:
                for hop, times in self.flows.get(op, hops(route)).items():
                    carried[hop] += times * self._wire_bytes(op) * self.program.pieces
        total = max(self.end, default=0.0)
        busy = {
            pair: bytes_ / (float(self.routes.capacity[pair]) * 1e3 * total) if total else 0.0
            for pair, bytes_ in carried.items()
        }
        count = len(self.ops)
        # In the result, operations are numbered by their position in `refs`.
        piece, place = np.divmod(np.arange(len(self.end)), max(count, 1))
        order = np.lexsort((piece, place, np.array(self.start)))
        events = [
            Event(
                self.refs[i % count],
                i // count,
                self.start[i],
                self.left_at[i],
                self.end[i],
                self.route_of[i % count],
            )
            for i in order.tolist()
        ]
        return SimulationResult(
            program=self.program.name,
            topology=self.topology.name,
            size_bytes=self.size,
            pieces=self.program.pieces,
            time_us=total,
            events=tuple(events),
            link_bytes=carried,
            link_busy=busy,
        )
