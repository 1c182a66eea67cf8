"""Times puts (one-sided writes) between two ranks, for `ark topo measure`.

Both ranks exchange data in one launch, and each transfer waits for the previous one. So a measured
time is the latency of a put plus the time of its bytes, in both directions at once. All pairs of a
job are measured one after another while the other ranks wait. All pairs run the same plans; each
rank creates some of the plans and sends them to the others. Called by ark.cli.topo_measure.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping

import msgspec

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.comm import case_plans, measure
from ark.cli.measure.comm_peer import GRAPH, CommCase
from ark.collective.classics import build
from ark.collective.programs import Collective
from ark.collective.topology.measured import Line, Pair, fit
from ark.distributed.members import Members
from ark.errors import PlanError, UnsupportedError
from ark.ir.dtype import by_name
from ark.ir.json_reader import read
from ark.lower.engines import PACKET, THREADS
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.runtime.bootstrap import Bootstrap

SIZES_BYTES = (64, 4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes of a put
_SPLIT_PUTS = 8  # a put is also measured as this many smaller ones
_SMALL_BYTES, _LARGE_BYTES = 4 << 10, 1 << 20
_ENGINES = (PACKET, THREADS)
_SWAP, _SUM = Collective.ALL_TO_ALL.value, Collective.ALL_REDUCE.value
# In the measured exchange, a rank sends half of its tensor and keeps the other half, so the tensor
# has twice the bytes of a put.
_PUTS = {(e, n): (_SWAP, 2 * n, e, 1) for e in _ENGINES for n in SIZES_BYTES}
_MANY_PUTS = {e: (_SWAP, 2 * _SMALL_BYTES, e, _SPLIT_PUTS) for e in _ENGINES}
_SUMS = {e: (_SUM, _LARGE_BYTES, e, 1) for e in _ENGINES}
Asked = tuple[str, int, str, int]  # collective, bytes, engine, pieces


def measure_pairs(job: Bootstrap, backend: Backend, device: Device, repeats: int) -> list[Pair]:
    """Measures every pair of ranks of the job; returns the same figures on each rank."""
    plans = _links_plans(job, device, repeats)
    pairs: list[Pair] = []
    for pair in itertools.combinations(range(job.world_size), 2):
        encoded = b""
        if job.rank in pair:
            members = Members(job, pair, "a pair that is measured")
            encoded = msgspec.json.encode(_measured(pair, members, backend, device, repeats, plans))
        pairs.append(
            read(job.all_gather(encoded, f"pair {pair}")[pair[0]], Pair, "a measured pair")
        )
    return pairs


def _case(asked: Asked, repeats: int) -> CommCase:
    collective, nbytes, engine, pieces = asked
    program = build("one_shot", collective, 2, pieces=pieces)
    return CommCase(
        collective, nbytes, by_name("fp32"), GRAPH, program, engine, repeats, least=True
    )


def _links_plans(job: Bootstrap, device: Device, repeats: int) -> Mapping[Asked, list[Plan]]:
    """The verified plans of both ranks of a pair, for each measured transfer (collective, bytes,
    engine, pieces). Transfers that the machine does not support are omitted.
    """
    every = [*_PUTS.values(), *_MANY_PUTS.values(), *_SUMS.values()]
    own: dict[int, list[str]] = {}
    for number in range(job.rank, len(every), job.world_size):
        try:
            pair_plans = case_plans(_case(every[number], repeats), 2, device)
        except (PlanError, UnsupportedError):
            continue  # the machine does not support this engine or size
        own[number] = [to_json(p) for p in pair_plans]
    plans_of: dict[Asked, list[Plan]] = {}
    for part in job.all_gather(json.dumps(own).encode(), "the plans of pairs"):
        for number, texts in read(part, dict[int, list[str]], "plans").items():
            plans_of[every[number]] = [from_json(t) for t in texts]
    return plans_of


def _measured(
    pair: tuple[int, int],
    members: Members,
    backend: Backend,
    device: Device,
    repeats: int,
    plans: Mapping[Asked, list[Plan]],
) -> Pair:
    def us(asked: Asked) -> float:
        case = _case(asked, repeats)
        return 1e6 * measure(case, members, backend, device, None, plans[asked]).seconds

    lines: dict[str, Line] = {}
    us_of: dict[Asked, float] = {}
    for engine in _ENGINES:
        sizes = [n for n in SIZES_BYTES if _PUTS[engine, n] in plans]
        us_of |= {_PUTS[engine, n]: us(_PUTS[engine, n]) for n in sizes}
        if len(sizes) > 1:
            lines[engine] = fit(sizes, [us_of[_PUTS[engine, n]] for n in sizes])
    if not lines:
        raise UnsupportedError("no engine can move data between these ranks; see `ark info`")
    quick = min(lines, key=lambda name: lines[name].alpha_us)
    more = us(_MANY_PUTS[quick]) - us_of[_PUTS[quick, _SMALL_BYTES]]
    wide = max(lines, key=lambda name: lines[name].gbps)
    moved = lines[wide].alpha_us + _LARGE_BYTES / lines[wide].gbps / 1e3
    sums = us(_SUMS[wide]) - moved
    return Pair(
        *pair,
        lines,
        max(0.0, more / (_SPLIT_PUTS - 1)),
        # Bytes per ns of a sum on this rank: per element, it reads two values and writes one.
        3 * _LARGE_BYTES / sums / 1e3 if sums > 0 else None,
    )
