"""`ark topo measure`: latency, bandwidth and costs between ranks here, into a topology."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import msgspec

from ark.backend import registry
from ark.bench.comm_links import measure_pair
from ark.cli.common import positive, write_file
from ark.comm.simulate import Routes
from ark.comm.topology import Topology, full_mesh, load, to_json
from ark.comm.topology.measured import Pair, measured
from ark.errors import InvalidUsageError
from ark.json_reader import read
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.launch import launch_command
from ark.runtime.rank_info import rank_from_environment


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the options of `ark topo measure`."""
    command.add_argument(
        "topology",
        metavar="TOPOLOGY",
        nargs="?",
        help="the wiring; a link between every two ranks if none is named",
    )
    command.add_argument("--ranks", type=positive, metavar="N", help="ranks: the topology's, or 2")
    command.add_argument("--out", metavar="FILE", help="write the topology here, as JSON")
    command.add_argument("--repeats", type=positive, default=3, help="of every time (3)")
    command.add_argument("--backend")
    command.add_argument("--pair", metavar="A,B", help=argparse.SUPPRESS)  # one of two such ranks


def run(args: argparse.Namespace) -> int:
    """Measures all pairs, each in a job of two ranks, or is a rank of such a job."""
    if args.pair is not None:
        return _rank(args)
    topology = load(args.topology) if args.topology else full_mesh(max(args.ranks or 2, 2))
    ranks = len(topology.ranks)
    if ranks < 2 or args.ranks not in (None, ranks):
        raise InvalidUsageError(
            f"{topology.name} has {ranks} ranks, and --ranks says {args.ranks or ranks}; they must "
            "agree, and be 2 or more."
        )
    _, probe = registry.choose(args.backend)
    if args.backend not in (None, registry.FALLBACK) and ranks > len(probe.devices):
        raise InvalidUsageError(
            f"{ranks} ranks need as many devices; {len(probe.devices)} were found."
        )
    pairs = []
    for one, other in itertools.combinations(range(ranks), 2):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "pair.json"
            words = ["topo", "measure", "--pair", f"{one},{other}", "--out", str(file)]
            words += ["--repeats", str(args.repeats)]
            words += ["--backend", args.backend] if args.backend else []
            code = launch_command(2, [sys.executable, "-m", "ark", *words])
            if code:
                return code
            pairs.append(read(file.read_bytes(), Pair, "the measured pair"))
    made = _written(topology, pairs)
    if args.out is None:
        print(to_json(made), end="")
        return 0
    write_file(args.out, to_json(made))
    for pair in pairs:
        for name, line in pair.lines.items():
            print(
                f"{topology.ranks[pair.one]} - {topology.ranks[pair.other]}, {name}: "
                f"{line.alpha_us:.2f} us, {line.gbps:.2f} GB/s each way"
            )
    costs = made.costs
    assert costs is not None
    sums = "not told" if costs.local_gbps is None else f"{costs.local_gbps:.1f} GB/s"
    print(f"a put more: {costs.put_overhead_us:.2f} us; sums: {sums} -> {args.out}")
    return 0


def _written(topology: Topology, pairs: list[Pair]) -> Topology:
    routes = Routes(topology)
    names = topology.ranks
    ways = {
        (a, b): routes.default(names[a], names[b])
        for a, b in itertools.permutations(range(len(names)), 2)
    }
    return measured(topology, pairs, ways)


def _rank(args: argparse.Namespace) -> int:
    info = rank_from_environment()
    try:
        one, other = (int(word) for word in args.pair.split(","))
    except ValueError:
        raise InvalidUsageError(f"--pair {args.pair!r} is no pair of ranks.") from None
    if info.world_size != 2:
        raise InvalidUsageError("--pair is for the two ranks that `ark topo measure` starts.")
    backend, probe = registry.choose(args.backend)
    with Bootstrap.from_environment(rank_info=info) as job:
        device = backend.open((one, other)[info.rank] % len(probe.devices))
        try:
            pair = measure_pair(one, other, job, backend, device, args.repeats)
        finally:
            device.close()
    if info.rank == 0:
        write_file(args.out, msgspec.json.encode(pair))
    return 0
