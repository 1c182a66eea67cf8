"""`ark emit PLAN --backend NAME --arch ARCH -o DIR`: writes the source of a plan's loop kernel,
without a device.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.backend.protocol import KernelBackend, OccupancyBackend, Target
from ark.cli.common import memory_verdict, read_plan, write_file
from ark.cli.parser import Subparsers, add_backend, flag, option
from ark.errors import SystemError
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.runtime.admission import admit, check_target


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser("emit", help="write a plan's loop kernel as source for a backend")
    p.add_argument(
        "plan", nargs="+", help="the plan file; with several ranks, all of them in order"
    )
    add_backend(p, required=True)
    option(p, "--arch NAME", "architecture (default: that of the plan's machine)")
    option(p, "-o --output DIR", "folder for the source", required=True)
    flag(
        p,
        "--binary",
        "compile the source too, and print its registers, spills, shared memory and occupancy",
    )
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    plans = [read_plan(path) for path in args.plan]
    admit(plans)
    backend = registry.with_kernels(registry.get(args.backend))
    for plan in plans:
        check_target(machine_of(plan), backend.name, args.arch)
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemError(f"{folder} cannot be made: {error}; choose another place") from error
    for plan in plans:
        stem = "loop" if len(plans) == 1 else f"loop.{plan.rank}"
        for phases in plan.kernels:
            more = f".{plan.phases[phases[0]].name}" if phases[-1] < len(plan.phases) - 1 else ""
            _emit(args, backend, plan, phases, folder, stem + more)
    return memory_verdict(plans)


def _emit(
    args: argparse.Namespace,
    backend: KernelBackend,
    plan: Plan,
    phases: range,
    folder: Path,
    stem: str,
) -> None:
    """Writes files with the source of the kernel that runs the phases `phases` of the plan. stem:
    the beginning of the files' names.
    """
    made_for = machine_of(plan, phases[0])
    arch = args.arch or made_for.arch
    machine = dataclasses.replace(made_for, arch=arch)
    dialect = backend.dialect(arch)
    emitted = write(plan, machine, dialect, phases)
    path = folder / f"{stem}{dialect.suffix}"
    write_file(str(path), emitted.source.text)
    print(
        f"{path}: {len(emitted.source.text):,} bytes, {len(emitted.bodies)} task bodies, "
        f"for {backend.name} {arch}"
    )
    if args.binary:
        target = Target(arch, machine.threads)
        binary = backend.compiler().compile(emitted.source, target)
        out = folder / f"{stem}{binary.suffix}"
        write_file(str(out), binary.data)
        print(f"{out}: {len(binary.data):,} bytes, compiled")
        if isinstance(backend, OccupancyBackend):
            dynamic = emitted.scratch_bytes + machine.ring_bytes
            print(f"{out}: {backend.occupancy(binary, target, dynamic)}")
