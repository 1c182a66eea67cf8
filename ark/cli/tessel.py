"""`ark tessel`: computes the schedule of a pipeline. The schedule states at which time a device
computes which block of which micro-batch. The placement of the blocks on devices is an input: a
file, or the name of a common placement.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from ark import log
from ark.cli.common import read_file, visible
from ark.cli.parser import Subparsers, flag, option, positive
from ark.parallel.pipeline import SHAPES, Placement, Schedule, shape, tessel

MAX_TIMELINE_COLUMNS = 160  # the most columns of a drawn timeline


def register(subparsers: Subparsers) -> None:
    """Adds `ark tessel`."""
    parser = subparsers.add_parser(
        "tessel",
        help="find the pipeline schedule of the shortest period",
        description="PLACEMENT is a file "
        '{"devices": 4, "blocks": [{"name", "span", "memory", "devices", "after"}, ...]} or a '
        f"shape: {', '.join(SHAPES)}.",
    )
    parser.set_defaults(func=_tessel)
    parser.add_argument("placement", metavar="PLACEMENT", help="file or shape, as above")
    option(parser, "--memory M", "memory of each device, in the blocks' units", int, required=True)
    option(parser, "--micro-batches N", "micro-batches to schedule", positive, 8)
    option(parser, "--devices N", "devices of a shape", positive, 4)
    option(parser, "--forward T", "span of a shape's forward block", positive, 1)
    option(parser, "--backward T", "span of a shape's backward block", positive, 3)
    flag(parser, "--inference", "forward blocks of a shape alone")
    option(parser, "--time-limit S", "seconds of search", float, 60.0)
    flag(parser, "--json", "print one JSON object")


def _tessel(args: argparse.Namespace) -> int:
    if args.placement in SHAPES:
        sizes = (args.devices, args.forward, args.backward)
        placement = shape(args.placement, *sizes, inference=args.inference)
    else:
        placement = Placement.from_json(read_file(args.placement, "a placement"))
    with log.slow("searching a schedule"):
        schedule = tessel(placement, args.memory, args.micro_batches, args.time_limit)
    if args.json:
        print(json.dumps(_object(schedule)))
        return 0
    proof = "the least" if schedule.optimal else f"the least is not below {schedule.period_bound}"
    above = schedule.makespan - schedule.makespan_bound
    end = f"at most {above} above the least" if above else "the least"
    print(f"period {schedule.period} ({proof}), makespan {schedule.makespan} ({end})")
    for line in _timeline(placement, schedule):
        print(line)
    return 0


def _object(schedule: Schedule) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "period": schedule.period,
        "makespan": schedule.makespan,
        "optimal": schedule.optimal,
    }
    if schedule.makespan > schedule.makespan_bound:
        answer["makespan_bound"] = schedule.makespan_bound
    if not schedule.optimal:
        answer["bound"] = schedule.period_bound
    return {**answer, "schedule": [dataclasses.asdict(entry) for entry in schedule.entries]}


def _timeline(placement: Placement, schedule: Schedule) -> list[str]:
    """Lines of text: a legend, and a line for each device with the micro-batch that it computes at
    each time, shown by its last digit (as a letter in backward blocks).
    """
    width = min(MAX_TIMELINE_COLUMNS, schedule.makespan)
    rows = [["."] * width for _ in range(placement.devices)]
    backward = {b.name for b in placement.blocks if b.memory < 0}
    for entry in schedule.entries:
        for at in range(entry.start, min(width, entry.start + entry.span)):
            for device in entry.devices:
                digit = "0123456789"[entry.micro_batch % 10]
                letter = "abcdefghij"[entry.micro_batch % 10]
                rows[device][at] = letter if entry.block in backward else digit
    more = " ..." if width < schedule.makespan else ""
    legend = ["digits: micro-batches; letters: those whose memory is given back"]
    return legend + [visible(f"{d:4} {''.join(row)}{more}") for d, row in enumerate(rows)]
