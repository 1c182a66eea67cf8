"""What puts between two ranks take: the figures of `ark topo measure`.

Both ranks exchange data in one launch, each transfer waiting for the one before, so that a time is
a put's latency and its bytes, in both directions at once. Called by ark.cli.topo_measure, in a job
of two ranks for every pair of devices.
"""

from __future__ import annotations

from ark.backend.protocol import Backend, Device
from ark.bench.comm import measure
from ark.bench.comm_peer import GRAPH, CommCase
from ark.collective import Collective
from ark.comm.classics import build
from ark.comm.topology.measured import Line, Pair, fit
from ark.errors import PlanError, UnsupportedError
from ark.ir.dtype import by_name
from ark.lower.engines import PACKET, THREADS
from ark.runtime.bootstrap import Bootstrap

SIZES = (64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)  # bytes of a put
_MANY = 8  # puts in place of one
_SMALL, _LARGE = 4 << 10, 1 << 20


def measure_pair(
    one: int, other: int, job: Bootstrap, backend: Backend, device: Device, repeats: int
) -> Pair:
    """Measures this job's two ranks, which stand for the ranks `one` and `other` of a network."""
    dtype = by_name("fp32")

    def seconds(collective: str, nbytes: int, engine: str, pieces: int = 1) -> float:
        program = build("one_shot", collective, 2, pieces=pieces)
        case = CommCase(collective, nbytes, dtype, GRAPH, program, engine, repeats)
        return measure(case, job, backend, device, None).seconds

    lines: dict[str, Line] = {}
    for engine in (PACKET, THREADS):
        sizes, times = [], []
        for nbytes in SIZES:
            try:
                # Of what a rank exchanges it keeps half.
                times.append(1e6 * seconds(Collective.ALL_TO_ALL.value, 2 * nbytes, engine))
            except (PlanError, UnsupportedError):
                continue  # not by this engine, or not as much at once
            sizes.append(nbytes)
        if len(sizes) > 1:
            lines[engine] = fit(sizes, times)
    if not lines:
        raise UnsupportedError("no engine moves data between these ranks; see `ark info`.")
    quick = min(lines, key=lambda name: lines[name].alpha_us)
    many = seconds(Collective.ALL_TO_ALL.value, 2 * _SMALL, quick, _MANY)
    single = seconds(Collective.ALL_TO_ALL.value, 2 * _SMALL, quick)
    wide = max(lines, key=lambda name: lines[name].gbps)
    moved = lines[wide].alpha_us + _LARGE / lines[wide].gbps / 1e3
    sums = 1e6 * seconds(Collective.ALL_REDUCE.value, _LARGE, wide) - moved
    return Pair(
        one,
        other,
        lines,
        max(0.0, (many - single) / (_MANY - 1) * 1e6),
        3 * _LARGE / sums / 1e3 if sums > 0 else None,  # two read and one written
    )
