"""Measures collectives by every algorithm and engine that ranks of one host can run, and finds the
fastest for each size. Called by ark.cli.tune_comm on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.cli.measure.comm import measure
from ark.cli.measure.comm_peer import CommCase
from ark.collective.synthesis import algorithms
from ark.collective.topology import full_mesh
from ark.errors import PlanError, UnsupportedError
from ark.ir.dtype import DataType
from ark.lower.engines import AUTO, ENGINES, MESSAGES, PACKET
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.tuned_collectives import Entry

SEARCHED = (
    "forestcoll",
    "taccl",
)  # algorithms whose synthesis takes long and that do not help on a full mesh
MAX_PACKET_BYTES = 4 << 20  # packets double the traffic, so larger results are not tried with them
Tell = Callable[[str, str, float | None], None]


def tune(
    collective: str,
    nbytes: int,
    dtype: DataType,
    repeats: int,
    job: Bootstrap,
    backend: Backend,
    device: Device,
    tell: Tell,
) -> Entry:
    """The fastest variant for one size, the same on all ranks. tell: called with each variant that
    was tried and its seconds, or None if it cannot be run.
    """

    def seconds(algorithm: str, engine: str) -> float | None:
        case = CommCase(collective, nbytes, dtype, "graph", algorithm, engine, repeats)
        try:
            figures = measure(case, job, backend, device, None)
        except (PlanError, UnsupportedError):  # every rank raises the same error
            tell(algorithm, engine, None)
            return None
        measured = None if figures.wrong else figures.seconds
        tell(algorithm, engine, measured)
        return measured

    usual = seconds("auto", AUTO)
    machine = device.machine
    own = (ENGINES[name] for name in MESSAGES if not ENGINES[name].proxied)
    able = [e.name for e in own if e.on(machine)]
    engines = [e for e in able if e != PACKET or nbytes <= MAX_PACKET_BYTES]
    known = algorithms(full_mesh(job.world_size), collective)
    best = ("auto", AUTO, usual)
    by_algorithm: dict[str, str] = {}
    for algorithm in (a for a in known if a not in SEARCHED):
        tried = {e: elapsed for e in engines if (elapsed := seconds(algorithm, e)) is not None}
        if not tried:
            continue
        engine = by_algorithm[algorithm] = min(tried, key=tried.__getitem__)
        if best[2] is None or tried[engine] < best[2]:
            best = (algorithm, engine, tried[engine])
    algorithm, engine, elapsed = best
    if elapsed is None:
        raise UnsupportedError(f"no algorithm of {collective} runs on {machine.name}")
    return Entry(nbytes, algorithm, engine, elapsed * 1e6, (usual or elapsed) * 1e6, by_algorithm)
