"""`ark tune`: measures the best tiling of a model's matmuls on this machine, and stores it."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Callable

import numpy as np

from ark.backend import registry
from ark.cli import tune_comm
from ark.cli.common import check_device, output
from ark.cli.measure.cases import cases
from ark.cli.measure.ops import planned
from ark.cli.measure.tune import Product, products, tune
from ark.cli.parser import DIM, Subparsers, add_backend, add_device, flag, option, positive
from ark.cli.plan import read_plans
from ark.cli.run import dimensions
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError, UnsupportedError
from ark.lower.cuts import Cut
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.runtime import tuned
from ark.runtime.tuned import Choice


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "tune",
        help="measure how products are best cut on this machine, and keep it",
        description="Runs every matrix product of the sources with each cut into tiles that its "
        "kernels have, and keeps the fastest in ark's cache. Plans for this device take it from "
        "then on; they are the same as long as the choices are.",
    )
    p.add_argument(
        "sources",
        nargs="*",
        metavar="SOURCE",
        help="a model (FILE.onnx), a plan (FILE.json, of `ark plan`) or cases of `ark bench ops`, "
        "with * and ?",
    )
    option(p, "--dim NAME=N", DIM, several=True)
    option(p, "--repeats N", "launches of each cut, of which the median counts", positive, 5)
    add_backend(p)
    add_device(p)
    flag(p, "--show", "print what was kept for the device")
    flag(p, "--forget", "remove what was kept for the device")
    tune_comm.arguments(p)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    if args.collectives:
        return tune_comm.run(args)
    backend, probe = registry.choose(args.backend)
    check_device(args.device, backend.name, len(probe.devices))
    if not args.sources and not args.show and not args.forget:
        raise InvalidUsageError("name a model, a plan or a case of `ark bench ops --list`")
    device = backend.open(args.device)
    try:
        machine = device.machine
        if args.forget:
            tuned.KEPT.forget(machine)
        kept = tuned.KEPT.load(machine)
        sizes = products(_plans(args.sources, args.dim, machine))
        if args.sources and not sizes:
            raise InvalidUsageError("the sources have no matrix product whose tiling can be chosen")
        for product in sizes:
            choice = tune(product, backend, device, args.repeats, _tell(product))
            if choice is None:
                raise UnsupportedError(f"the product {product} cannot be run with any tiling")
            kept[product.key] = choice
        if sizes:
            tuned.KEPT.store(machine, kept)
    finally:
        device.close()
    names = {p.key: str(p) for p in sizes}
    shown = kept if args.show else {key: kept[key] for key in names}
    if shown or args.show:
        _show(f"{backend.name} {machine.name}", shown, names)
    return 0


def _tell(product: Product) -> Callable[[Cut, float | None], None]:
    def tell(cut: Cut, seconds: float | None) -> None:
        text = "cannot be run" if seconds is None else f"{seconds * 1e6:.1f} us"
        parts = f", {cut.parts} parts of k" if cut.parts > 1 else ""
        print(f"{product}: {cut.rows} x {cut.columns}{parts}: {text}", file=sys.stderr, flush=True)

    return tell


def _plans(sources: list[str], dims: list[str], machine: Machine) -> list[Plan]:
    """The plans of `sources`, each of which names a model, a plan file or a bench case. The plans
    do not use tilings that earlier runs of `ark tune` have stored.
    """
    plans: list[Plan] = []
    for source in sources:
        if source.endswith(".json"):
            plans += read_plans([source])
        elif source.endswith(".onnx"):
            plans.append(_onnx(source, dims, machine))
        else:
            fitting = [c for c in cases() if fnmatch.fnmatch(c.name, source)]
            if not fitting:
                raise InvalidUsageError(
                    f"{source!r} is neither a model (FILE.onnx), a plan (FILE.json) nor a case of "
                    "`ark bench ops --list`"
                )
            plans += [planned(case, machine)[0] for case in fitting]
    return plans


def _onnx(path: str, dims: list[str], machine: Machine) -> Plan:
    from ark.interop import from_onnx

    model = from_onnx(path, dimensions(dims))
    arrays = {}
    for port in model.inputs:
        if port.sizes is None:
            raise InvalidUsageError(
                f"the input {port} has sizes without a value; set each by --dim NAME=N"
            )
        arrays[port.name] = np.zeros(port.sizes, port.dtype)
    return make_plan(model.graph(arrays).model.graph, machine)


def _show(device: str, choices: dict[str, Choice], names: dict[str, str]) -> None:
    heads = ("product", "rows x columns, parts", "us", "the usual cut, us", "gain")
    table = FigureTable(f"cuts of products on {device}", heads, left=2)
    for key, choice in choices.items():
        rows, columns, parts = choice.cut
        table.add_row(
            names.get(key, key),
            f"{rows} x {columns}, {parts}",
            f"{choice.us:.1f}",
            f"{choice.usual_us:.1f}",
            f"{choice.usual_us / choice.us:.2f}" if choice.us else "",
        )
    output().print(table)
