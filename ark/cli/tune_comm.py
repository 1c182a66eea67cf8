"""`ark tune --collectives`: measures the fastest algorithm and engine for each collective, and
stores them.
"""

from __future__ import annotations

import argparse
import sys

from ark.backend import registry
from ark.cli.bench_comm import sizes
from ark.cli.common import device_index, output, to_be_started
from ark.cli.measure.comm import COLLECTIVES
from ark.cli.measure.tune_comm import Tell, tune
from ark.cli.parser import flag, option, positive
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError
from ark.ir.dtype import fp32
from ark.runtime import tuned_collectives as tuned
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment


def arguments(p: argparse.ArgumentParser) -> None:
    flag(
        p,
        "--collectives",
        "measure collectives instead: SOURCES are some of "
        f"{', '.join(COLLECTIVES)}, by default all; ranks take what was fastest from then on",
    )
    option(p, "--ranks N", "ranks to start, with --collectives", positive, 1)
    option(p, "--sizes FROM:TO", "bytes of messages, with K, M or G", default="1K:16M")
    option(p, "--factor N", "ratio of a size to the one before", positive, 4)


def run(args: argparse.Namespace) -> int:
    names = args.sources or list(COLLECTIVES)
    unknown = [n for n in names if n not in COLLECTIVES]
    if unknown:
        raise InvalidUsageError(
            f"the collective {unknown[0]!r} does not exist; choose one of {', '.join(COLLECTIVES)}"
        )
    backend, probe = registry.choose(args.backend)
    ranks = rank_from_environment()
    if args.show or args.forget:
        device = backend.open(device_index(args.device, ranks, len(probe.devices)))
        try:
            if args.forget:
                tuned.KEPT.forget(device.machine)
            if args.show:
                show(f"{backend.name} {device.machine.name}", tuned.KEPT.load(device.machine))
        finally:
            device.close()
        return 0
    if args.ranks < 2 and ranks.world_size < 2:
        raise InvalidUsageError("collectives need ranks; say how many with --ranks N")
    row = sizes(args.sizes, args.factor)
    if to_be_started(args.ranks, ranks):
        return launch_command(args.ranks, [sys.executable, "-m", "ark", *args.words])
    index = device_index(args.device, ranks, len(probe.devices))
    with Bootstrap.from_environment(rank_info=ranks) as job:
        device = backend.open(index)
        try:
            machine = device.machine
            measurements: tuned.Table = {}
            for name in names:
                for nbytes in row:
                    tell = _tell(name, nbytes, ranks.rank == 0)
                    entry = tune(name, nbytes, fp32, args.repeats, job, backend, device, tell)
                    measurements.setdefault(tuned.key(name, ranks.world_size), []).append(entry)
        finally:
            device.close()
    if ranks.rank == 0:
        table = tuned.KEPT.load(machine)
        for key, entries in measurements.items():
            measured = {e.nbytes for e in entries}
            others = (e for e in table.get(key, ()) if e.nbytes not in measured)
            table[key] = sorted([*entries, *others], key=lambda e: e.nbytes)
        tuned.KEPT.store(machine, table)
        show(f"{backend.name} {machine.name}", measurements)
    return 0


def _tell(collective: str, nbytes: int, aloud: bool) -> Tell:
    def tell(algorithm: str, engine: str, seconds: float | None) -> None:
        text = "cannot be run" if seconds is None else f"{seconds * 1e6:.1f} us"
        if aloud:
            line = f"{collective} {nbytes}: {algorithm}, {engine}: {text}"
            print(line, file=sys.stderr, flush=True)

    return tell


def show(device: str, measurements: tuned.Table) -> None:
    heads = ("collective", "ranks", "bytes", "algorithm", "engine", "us", "the usual, us", "gain")
    table = FigureTable(f"collectives on {device}", heads, left=5)
    for key, entries in sorted(measurements.items()):
        name, _, world = key.rpartition(".")
        for e in sorted(entries, key=lambda e: e.nbytes):
            gain = f"{e.usual_us / e.us:.2f}" if e.us else ""
            times = f"{e.us:.1f}", f"{e.usual_us:.1f}", gain
            table.add_row(name, world, str(e.nbytes), e.algorithm, e.engine, *times)
    output().print(table)
