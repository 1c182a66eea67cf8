"""`ark info`: lists this machine's backends and devices. `--require NAME:N` fails if there are
fewer devices.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from collections.abc import Mapping
from typing import Any

from ark._version import __version__
from ark.backend import machine_files, registry
from ark.backend.protocol import Probe
from ark.cli.common import output
from ark.cli.parser import Subparsers, flag, option
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError, SystemError
from ark.runtime import cache


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("info", help="show backends, devices and versions, or require some")
    flag(p, "--json", "print one JSON object")
    option(
        p,
        "--require NAME:N",
        "fail unless backend NAME has N devices (default: nothing is required)",
    )
    option(
        p,
        "--machine NAME",
        "print that machine model as JSON, which `ark plan --machine FILE.json` takes, "
        "changed or as it is (default: none)",
    )
    p.set_defaults(func=run)


def requirement(text: str) -> tuple[str, int]:
    """Parses NAME:N to a backend's name and a number of devices. Raises InvalidUsageError if the
    text does not have that form.
    """
    name, _, count = text.partition(":")
    if not name or not re.fullmatch(r"[0-9]{0,9}", count):
        raise InvalidUsageError(f"{text!r} is not a requirement; write it as BACKEND:DEVICES")
    return name, int(count or 1)


def run(args: argparse.Namespace) -> int:
    if args.machine:
        print(machine_files.write(machine_files.machine(args.machine)))
        return 0
    wanted = requirement(args.require) if args.require else None
    probes = {name: registry.probe(name) for name in registry.names()}
    if args.json:
        print(json.dumps(as_json(probes), indent=2, sort_keys=True))
    else:
        show(probes)
    if wanted:
        name, count = wanted
        registry.get(name)
        devices = len(probes[name].devices)
        if devices < count:
            raise SystemError(
                f"{args.require} is required, but {devices} devices of {name!r} were found: "
                f"{probes[name].reason or 'too few'}"
                + (f"; fix: {probes[name].remedy}" if probes[name].remedy else "")
            )
    return 0


def as_json(probes: Mapping[str, Probe]) -> dict[str, Any]:
    """The full output of `ark info --json`."""
    return {
        "ark": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cache": str(cache.folder()),
        "backends": {
            name: {
                "devices": [
                    {"index": d.index, "name": d.name, "arch": d.arch, "memory": d.memory_bytes}
                    for d in probe.devices
                ],
                "reason": probe.reason,
                "remedy": probe.remedy,
                "versions": probe.versions,
                "notes": list(probe.notes),
            }
            for name, probe in probes.items()
        },
    }


def show(probes: Mapping[str, Probe]) -> None:
    console = output()
    console.print(f"ark {__version__}, Python {platform.python_version()}")
    table = FigureTable("", ("backend", "device", "architecture", "memory"), left=3)
    for name, probe in probes.items():
        for d in probe.devices:
            size = f"{d.memory_bytes / 1e9:.0f} GB"
            table.add_row(name, f"{d.index}: {d.name}", d.arch, size)
        if not probe.devices:
            table.add_row(name, "none", "", "")
    console.print(table)
    # Lines are not wrapped, because they contain commands to copy.
    for name, probe in probes.items():
        versions = ", ".join(f"{k} {v}" for k, v in sorted(probe.versions.items()))
        for remark in (probe.reason, *probe.notes, versions):
            if remark:
                console.print(f"{name}: {remark}", soft_wrap=True)
        if probe.remedy:
            console.print(f"{name}: to mend it: {probe.remedy}", soft_wrap=True)
    console.print(f"cache: {cache.folder()}", soft_wrap=True)
