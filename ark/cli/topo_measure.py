"""`ark topo measure`: measures the latency, bandwidth and costs between ranks, and writes a
topology.
"""

from __future__ import annotations

import argparse
import itertools
import sys

from ark import log
from ark.backend import registry
from ark.cli.common import to_be_started, write_file
from ark.cli.measure.comm_links import measure_pairs
from ark.cli.parser import add_backend, add_repeats, option, positive
from ark.collective.simulate import Routes
from ark.collective.topology import Topology, full_mesh, load, to_json
from ark.collective.topology.measured import Pair, measured
from ark.errors import InvalidUsageError
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of `ark topo measure`."""
    command.add_argument(
        "topology",
        metavar="TOPOLOGY",
        nargs="?",
        help="the wiring (default: a link between every two ranks)",
    )
    option(command, "--ranks N", "ranks to start (default: the topology's, or 2)", positive)
    option(command, "--out FILE", "FILE for the topology, as JSON (default: none)")
    add_repeats(command, 3)
    add_backend(command)


def run(args: argparse.Namespace) -> int:
    """Measures all pairs if this process is one of the ranks; otherwise starts all ranks."""
    topology = load(args.topology) if args.topology else None
    info = rank_from_environment()
    named = args.ranks or (info.world_size if info.world_size > 1 else None)
    topology = topology or full_mesh(max(named or 2, 2))
    ranks = len(topology.ranks)
    if ranks < 2 or named not in (None, ranks):
        raise InvalidUsageError(
            f"{topology.name} has {ranks} ranks, and --ranks says {named or ranks}; they must "
            "agree, and be 2 or more."
        )
    backend, probe = registry.choose(args.backend)
    if args.backend not in (None, registry.FALLBACK) and ranks > len(probe.devices):
        raise InvalidUsageError(
            f"{ranks} ranks need as many devices; {len(probe.devices)} were found."
        )
    if to_be_started(ranks, info):
        return launch_command(ranks, [sys.executable, "-m", "ark", *args.words])
    with Bootstrap.from_environment(rank_info=info) as job:
        device = backend.open(info.rank % len(probe.devices))
        try:
            with log.slow("measuring the pairs of ranks", aloud=info.rank == 0):
                pairs = measure_pairs(job, backend, device, args.repeats)
        finally:
            device.close()
    if info.rank == 0:
        _show(args.out, topology, pairs)
    return 0


def _show(out: str | None, topology: Topology, pairs: list[Pair]) -> None:
    written = _written(topology, pairs)
    if out is None:
        print(to_json(written), end="")
        return
    write_file(out, to_json(written))
    for pair in pairs:
        for name, line in pair.lines.items():
            print(
                f"{topology.ranks[pair.one]} - {topology.ranks[pair.other]}, {name}: "
                f"{line.alpha_us:.2f} us, {line.gbps:.2f} GB/s each way"
            )
    costs = written.costs
    assert costs is not None
    sums = "not told" if costs.local_gbps is None else f"{costs.local_gbps:.1f} GB/s"
    print(f"a put more: {costs.put_overhead_us:.2f} us; sums: {sums} -> {out}")


def _written(topology: Topology, pairs: list[Pair]) -> Topology:
    routes = Routes(topology)
    names = topology.ranks
    ways = {
        (a, b): routes.default(names[a], names[b])
        for a, b in itertools.permutations(range(len(names)), 2)
    }
    return measured(topology, pairs, ways)
