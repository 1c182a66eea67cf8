"""`ark doctor`: tests the properties of a device that the loop kernel relies on, one check for
each.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from rich.console import Console

from ark.backend import registry
from ark.cli.doctor import first_hour
from ark.cli.doctor.bench import Bench
from ark.cli.doctor.checks import Finding, examine
from ark.cli.parser import Subparsers, add_backend, add_device, flag, option
from ark.errors import InvalidUsageError


def register(subparsers: Subparsers) -> None:
    """Adds `ark doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check what the loop kernel needs of a device",
        description="Runs small kernels on a device, one for each thing that the loop kernel "
        "relies on: residency, order of messages, packets, host words, copies, clock, peers, "
        "bandwidth. Exit code 1 if one fails.",
    )
    parser.set_defaults(func=run)
    add_backend(parser)
    add_device(parser)
    flag(parser, "--json", "print one JSON object")
    flag(
        parser,
        "--first-hour",
        "run the first steps on a new kind of device instead: these checks, decoding beside "
        "the CPU, a figure; ends with a verdict, an archive to send and the next step",
    )
    option(
        parser, "--bundle FILE", "the archive of --first-hour (default: ark-first-hour-NAME.zip)"
    )
    option(
        parser,
        "--model DIR",
        "the checkpoint that --first-hour decodes with (default: examples/noah, if it is here)",
    )


def run(args: argparse.Namespace) -> int:
    backend, probe = registry.choose(args.backend)
    if not 0 <= args.device < len(probe.devices):
        raise InvalidUsageError(
            f"device {args.device} of {backend.name!r} does not exist; it has "
            f"{len(probe.devices)}, numbered from 0"
        )
    info = probe.devices[args.device]
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if args.first_hour and args.json:
        raise InvalidUsageError("--first-hour writes its report to an archive; omit --json")
    if not args.first_hour and (args.bundle or args.model):
        raise InvalidUsageError("--bundle and --model are options of --first-hour; add it")
    if not args.json:
        console.print(f"{backend.name} device {info.index}: {info.name} ({info.arch})")
        for note in probe.notes:
            console.print(note)

    if args.first_hour:
        hour = first_hour.Hour(
            backend.name,
            args.device,
            len(probe.devices),
            first_hour.find_model(args.model),
            emulated=probe.emulated,
        )
        archive = Path(args.bundle or f"ark-first-hour-{backend.name}.zip")
        return first_hour.run(hour, probe, archive, console.print)

    def shown(finding: Finding) -> None:
        if not args.json:
            console.print(f"{finding.verdict}  {finding.check:18} {finding.text}")

    with Bench(backend, args.device) as bench:
        findings = examine(bench, shown)
    if args.json:
        report = {
            "backend": backend.name,
            "device": {"index": info.index, "name": info.name, "arch": info.arch},
            "notes": list(probe.notes),
            "checks": [dataclasses.asdict(f) for f in findings],
        }
        print(json.dumps(report, indent=2))
    return int(any(f.verdict == "fail" for f in findings))
