"""Times how long ark takes to synthesise algorithms for collectives, and prints a line per case.
Usage: `python bench/comm.py`.

Each case runs in a new process. So times do not depend on caches that other cases filled, and
memory is measured per case. The time of imports is not counted. `--flows` compares maximum-flow
solvers instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction

import networkx
import numpy as np
from networkx.algorithms.flow import boykov_kolmogorov, dinitz, preflow_push
from ortools.graph.python.max_flow import SimpleMaxFlow

from ark.collective.forestcoll import forest, lower, optimal
from ark.collective.forestcoll.cuts import Ints
from ark.collective.forestcoll.network import network
from ark.collective.programs import check
from ark.collective.taccl import synthesize_taccl
from ark.collective.topology import named


def _optimum(name: str) -> str:
    best = optimal(named(name))
    return f"1/x* {best.inv_x}, k {best.k}"


def _trees(name: str, k: int | None = None) -> str:
    trees = forest(named(name), k=k)
    best = trees.optimum
    return f"1/x {best.inv_x}, k {best.k}, height {trees.height}, {len(trees.gathering)} trees"


def _weakened(name: str, src: str, dst: str) -> str:
    network_of = named(name)
    alive = tuple(link for link in network_of.links if {link.src, link.dst} != {src, dst})
    trees = forest(dataclasses.replace(network_of, links=alive))
    return f"1/x {trees.optimum.inv_x}, k {trees.optimum.k}, height {trees.height}"


def _program(name: str) -> str:
    report = check(lower(forest(named(name), "all_reduce")))
    return f"{report.operations} operations, {report.steps} steps"


def _gather_program(name: str) -> str:
    report = check(lower(forest(named(name), k=1)))
    return f"{report.operations} operations, {report.steps} steps"


def _taccl(name: str, seconds: float) -> str:
    schedule = synthesize_taccl(named(name), time_limit_s=seconds)
    return f"{schedule.routing_us:.1f} us, gap {schedule.gap:.1%}"


CASES: dict[str, tuple[str, Callable[[], str]]] = {
    "1/x* of 16 boxes of 8 A100": ("<= 1 s", lambda: _optimum("a100x16")),
    "trees A100 x2, k 13": ("<= 1.5 s", lambda: _trees("a100x2")),
    "trees H100 x4, k 1": ("<= 5 s", lambda: _trees("h100x4", 1)),
    "trees H100 x4, k 10": ("", lambda: _trees("h100x4")),
    "trees MI250 x2, k 83": ("<= 30 s", lambda: _trees("mi250x2", 83)),
    "trees MI300X x2, k 83": ("", lambda: _trees("mi300xx2")),
    "trees DGX-2 x2, k 13": ("", lambda: _trees("dgx2x2")),
    "trees 128 A100, k 1": ("<= 60 s", lambda: _trees("a100x16", 1)),
    "trees 128 MI250 dies, k 2": ("<= 60 s", lambda: _trees("mi250x8", 2)),
    "all-reduce program H100 x4, checked": ("", lambda: _program("h100x4")),
    "1/x* of 4,096 H100": ("", lambda: _optimum("h100x512")),
    "trees 1,024 H100": ("", lambda: _trees("h100x128")),
    "trees 1,000 ranks of a torus": ("", lambda: _trees("torus10x10x10")),
    "trees 512 ranks, fat tree": ("<= 30 s", lambda: _trees("fattree8x8x8")),
    "trees 512 ranks, fat tree, dead link": (
        "<= 30 s",
        lambda: _weakened("fattree8x8x8", "leaf3", "agg0.1"),
    ),
    "trees of torus 8x8x8, dead link": ("<= 30 s", lambda: _weakened("torus8x8x8", "g0", "g1")),
    "all-gather program 528 H100, checked": ("", lambda: _gather_program("h100x66")),
    "TACCL DGX-2 x2": ("<= 2 s", lambda: _taccl("dgx2x2", 60)),
    "TACCL 80 A100": ("<= 60 s", lambda: _taccl("a100x10", 60)),
}


def _measure(case: str) -> None:
    start, cpu_start = time.perf_counter(), time.process_time()
    result = CASES[case][1]()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps([seconds, cpu, megabytes, result]))


def _flows() -> None:
    """Prints the microseconds that each solver takes for a maximum flow from the source to one
    rank. The solvers are those that Python can call.
    """
    for name, scale, arc in (("a100x2", 3, 5 * 13), ("a100x16", 3, 5)):
        net = network(named(name))
        source = len(net.topology.nodes)
        tails = np.concatenate([net.tails, np.full(net.ranks, source)])
        heads = np.concatenate([net.heads, np.arange(net.ranks)])
        units = np.concatenate([net.capacity(Fraction(scale)), np.full(net.ranks, arc)])
        for label, solve in _solvers(source, tails, heads, units).items():
            start = time.perf_counter()
            flows = {solve(rank) for rank in range(net.ranks)}
            each = (time.perf_counter() - start) / net.ranks * 1e6
            print(f"{name:10} {label:38} {each:10.1f} us   flow {min(flows)}", flush=True)


def _solvers(source: int, tails: Ints, heads: Ints, units: Ints) -> dict[str, Callable[[int], int]]:
    graph = networkx.DiGraph()
    for tail, head, each in zip(tails, heads, units, strict=True):
        graph.add_edge(int(tail), int(head), capacity=int(each))
    kept = SimpleMaxFlow()
    arcs = kept.add_arcs_with_capacity(tails, heads, units)

    def reused(rank: int) -> int:
        kept.set_arcs_capacity(arcs, units)
        kept.solve(source, rank)
        return kept.optimal_flow()

    def rebuilt(rank: int) -> int:
        solver = SimpleMaxFlow()
        solver.add_arcs_with_capacity(tails, heads, units)
        solver.solve(source, rank)
        return solver.optimal_flow()

    def with_networkx(algorithm: Callable[..., object]) -> Callable[[int], int]:
        return lambda rank: networkx.maximum_flow_value(graph, source, rank, flow_func=algorithm)

    return {
        "OR-tools, graph kept, capacities set": reused,
        "OR-tools, graph rebuilt": rebuilt,
        "networkx preflow_push": with_networkx(preflow_push),
        "networkx dinitz": with_networkx(dinitz),
        "networkx boykov_kolmogorov": with_networkx(boykov_kolmogorov),
    }


def main() -> None:
    """Runs the cases whose names contain one of the given words, or all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flows", action="store_true", help="compare maximum-flow solvers")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("words", nargs="*", help="run only the cases that hold one of these")
    args = parser.parse_args()
    if args.flows:
        return _flows()
    if args.case:
        return _measure(args.case)
    print(f"{'case':38} {'target':>9} {'seconds':>9} {'cpu':>7} {'MiB':>5}  result")
    for case, (target, _) in CASES.items():
        if args.words and not any(word in case for word in args.words):
            continue
        done = subprocess.run(
            [sys.executable, __file__, "--case", case], capture_output=True, text=True
        )
        if done.returncode:
            print(f"{case:38} {target:>9}  failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        seconds, cpu, megabytes, result = json.loads(done.stdout)
        cost = f"{seconds:9.3f} {cpu:7.3f} {megabytes:5.0f}"
        print(f"{case:38} {target:>9} {cost}  {result}", flush=True)
    return None


if __name__ == "__main__":
    main()
