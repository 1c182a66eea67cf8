"""Times TACCL's stages on the networks of its paper: run `python bench/comm_taccl.py`.

Prints for each case the seconds of four steps: routing (building and solving the model), ordering
with contiguity, writing the program, and checking the program. The solver library is called once
before the clock starts. The sketches (the paper's hints to the solver) are those of its DGX-2 and
NDv2 experiments.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from ark.collective.programs import Collective, check
from ark.collective.taccl import Sketch, default_sketch, logical, order, route
from ark.collective.taccl.lower import lower
from ark.collective.topology import load

SHARE_BYTES = 1 << 20  # bytes of one rank's share


def dgx2(boxes: int) -> Sketch:
    """A sketch for DGX-2 boxes: odd ranks send to other boxes, even ranks receive from them. There
    are two chunks per rank.
    """
    odd = range(1, 16, 2)
    return _sketch(
        boxes,
        16,
        {
            "intranode_sketch": {"strategy": "switch", "switches": [list(range(16))]},
            "internode_sketch": {
                "strategy": "relay",
                "internode_conn": {str(i): [i - 1] for i in odd},
                "gpus_to_sender_rev_map": {str(i): [i - 1, i] for i in odd},
            },
            "symmetry_offsets": [[2, 16]],
            "hyperparameters": {"input_chunkup": 2},
        },
    )


def ndv2(boxes: int) -> Sketch:
    """A sketch for NDv2 boxes: rank 0 of each box sends to other boxes, rank 1 receives
    from them.
    """
    return _sketch(
        boxes,
        8,
        {
            "intranode_sketch": {"strategy": "none"},
            "internode_sketch": {"strategy": "relay", "internode_conn": {"0": [1]}},
        },
    )


def _sketch(boxes: int, per_box: int, raw: dict[str, Any]) -> Sketch:
    offsets = list(raw.get("symmetry_offsets", []))
    if boxes > 1:
        offsets.append([per_box, per_box * boxes])
    return Sketch.from_json({**raw, "nnodes": boxes, "symmetry_offsets": offsets})


# For each case: the topology, the sketch (None: derived from the topology), the collective, and the
# goal for the seconds of routing as text, which the table shows (empty: no goal).
CASES: tuple[tuple[str, Sketch | None, str, str], ...] = (
    ("ndv2", ndv2(1), "all_gather", ""),
    ("ndv2x2", ndv2(2), "all_gather", ""),
    ("ndv2x4", ndv2(4), "all_gather", ""),
    ("dgx2x2", dgx2(2), "all_gather", "<= 2 s"),
    ("dgx2x2", dgx2(2), "all_to_all", "<= 2 s"),
    ("dgx2x2", None, "all_gather", "<= 2 s"),
    ("dgx2x5", dgx2(5), "all_gather", "<= 60 s, 80 ranks"),
    ("ndv2x10", ndv2(10), "all_gather", "<= 60 s, 80 ranks"),
    ("ndv2x10", ndv2(10), "all_to_all", "<= 60 s, 80 ranks"),
    ("a100x10", None, "all_gather", "<= 60 s, 80 ranks"),
    ("h100x4", None, "all_to_all", ""),
    ("torus4x4", None, "all_gather", ""),
)


def main() -> None:
    """Runs every case, or only the cases whose topologies are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("topologies", nargs="*", metavar="TOPOLOGY")
    parser.add_argument("--time-limit", type=float, default=60.0, metavar="SECONDS")
    args = parser.parse_args()
    warm = logical(load("ring2"), Sketch())
    route(warm, False, SHARE_BYTES, 1.0)
    table = Table(title="TACCL, seconds a stage", title_justify="left")
    for column in (
        "network",
        "collective",
        "routing",
        "order",
        "lower",
        "check",
        "model us",
        "gap",
    ):
        table.add_column(column, justify="left" if column in ("network", "collective") else "right")
    table.add_column("limit")
    for name, sketch, collective, limit in CASES:
        if args.topologies and name not in args.topologies:
            continue
        topology = load(name)
        times = [time.perf_counter()]
        graph = logical(topology, sketch or default_sketch(topology))
        chunk = SHARE_BYTES / graph.sketch.input_chunkup
        routing = route(graph, collective == "all_to_all", chunk, args.time_limit)
        times.append(time.perf_counter())
        schedule = order(graph, routing, chunk)
        times.append(time.perf_counter())
        plan = (graph, routing, schedule)
        program = lower(graph, Collective(collective), plan, None, None, 1)
        times.append(time.perf_counter())
        check(program)
        times.append(time.perf_counter())
        stages = [f"{after - before:.2f}" for before, after in itertools.pairwise(times)]
        label = name if sketch is None else f"{name}, sketch"
        table.add_row(
            label, collective, *stages, f"{schedule.time_us:.1f}", f"{routing.gap:.1%}", limit
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
