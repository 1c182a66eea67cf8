"""`ark layout`: lists the collectives that change how a tensor is distributed over devices, and
their traffic.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from ark.cli.parser import Subparsers, flag, option
from ark.errors import InvalidUsageError
from ark.ir.dtype import by_name
from ark.parallel.layout import Layout, Step, change
from ark.parallel.layout.moves import D

MAX_DIMENSION_ELEMENTS = 1 << 40  # limit of a dimension


def register(subparsers: Subparsers) -> None:
    """Adds `ark layout`."""
    parser = subparsers.add_parser(
        "layout",
        help="find the cheapest collectives from one layout of a tensor to another",
        description="A layout says over how many devices a tensor is replicated, how many partial "
        "tensors add up to it, and into how many parts each dimension is cut: R2V1D4,1 is two "
        "replicas, no partial sums, rows cut in four. Volumes are those of ring algorithms.",
    )
    parser.set_defaults(func=_layout)
    option(parser, "--shape NxM", "the tensor's shape, as in 64x64", required=True)
    parser.add_argument(
        "--from", required=True, dest="before", metavar="LAYOUT", help="layout that is there"
    )
    parser.add_argument(
        "--to", required=True, dest="after", metavar="LAYOUT", help="layout that is wanted"
    )
    option(
        parser, "--topology NET", "topology of `ark topo`, for times in us (default: volumes alone)"
    )
    option(parser, "--dtype TYPE", "element type, for times", default="fp32")
    flag(parser, "--json", "print one JSON object")


def parse_shape(text: str) -> tuple[int, ...]:
    """A shape such as "64x64". Raises InvalidUsageError for other texts."""
    if not re.fullmatch(r"[0-9]{1,13}(x[0-9]{1,13})*", text):
        raise InvalidUsageError(f"{text[:60]!r} is not a shape; write sizes as in 64x64")
    shape = tuple(int(n) for n in text.split("x"))
    if not all(1 <= n <= MAX_DIMENSION_ELEMENTS for n in shape):
        raise InvalidUsageError(
            f"the shape {text[:60]} has a size that is not between 1 and 2^40; use one that is"
        )
    return shape


def _layout(args: argparse.Namespace) -> int:
    shape = parse_shape(args.shape)
    before, after = Layout.parse(args.before), Layout.parse(args.after)
    times: list[float] = []
    if args.topology is None:
        steps = change(shape, before, after)
    else:
        from ark.collective.topology import load
        from ark.parallel.layout.simulated import change_on

        network = load(args.topology)
        steps, times = change_on(network, shape, before, after, by_name(args.dtype).itemsize)
    total = _number(sum(step.elements for step in steps))
    if args.json:
        answer: dict[str, Any] = {"steps": [_entry(step) for step in steps], "elements": total}
        if args.topology is not None:
            for entry, us in zip(answer["steps"], times, strict=True):
                entry["us"] = us
            answer["us"] = sum(times)
        print(json.dumps(answer))
        return 0
    for i, step in enumerate(steps):
        op = step.op.replace("_", " ")
        time = f", {times[i]:.2f} us" if times else ""
        sent = _number(step.elements)
        print(f"{step.before} -> {step.after}: {op} among {step.ranks}, {sent}{time}")
    time = f" in {sum(times):.2f} us (simulated)" if args.topology is not None else ""
    print(f"{total} elements sent by each device{time}")
    return 0


def _entry(step: Step) -> dict[str, Any]:
    """A step (one collective) as a JSON object. A dimension of the tensor that is split or joined
    is given by its number.
    """
    entry: dict[str, Any] = {"op": step.op, "ranks": step.ranks}
    if step.source >= D:
        entry["from_dim"] = step.source - D
    if step.target >= D:
        entry["to_dim"] = step.target - D
    entry["elements"] = _number(step.elements)
    entry["before"], entry["after"] = str(step.before), str(step.after)
    entry["groups"] = [list(group) for group in step.groups]
    return entry


def _number(value: float) -> int | float:
    """A number as JSON has it: an integer if it is whole. Amounts per rank may have a fraction if
    there are few elements.
    """
    return int(value) if value == int(value) else value
