"""`ark bench torch`: torch.compile's backend "ark" beside "inductor", as a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

import ark
from ark.backend import registry
from ark.bench.peer import import_torch, torch_device
from ark.bench.results import Figure, figure, results
from ark.cli.common import write_results
from ark.cli.parser import Subparsers, add_backend, add_device, add_figures, add_repeats
from ark.errors import InvalidUsageError
from ark.runtime import session

if TYPE_CHECKING:
    from ark.bench.modules import ModuleFigures

NAMES = ("resnet", "mobilenet", "lstm", "bert", "gpt2")
MODELS = (
    "resnet50-16x224",
    "bert-base-8x128",
    "gpt2-124m-4x512",
    "vit-b-16-8x224",
    "llama-8-layers-2x512",
    "convnext-tiny-8x224",
)


def register(kinds: Subparsers) -> None:
    """Adds `ark bench torch`."""
    p = kinds.add_parser(
        "torch", help="torch.compile by ark and by inductor, small networks and whole models"
    )
    p.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"small networks: {', '.join(NAMES)} (default: these); whole models: "
        f"{', '.join(MODELS)}",
    )
    p.add_argument(
        "--vs", choices=("inductor",), help="measure the peer in the same run (default: no)"
    )
    add_repeats(p)
    add_backend(p)
    add_device(p)
    add_figures(p)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    unknown = [n for n in args.names if n not in (*NAMES, *MODELS)]
    if unknown:
        raise InvalidUsageError(
            f"no network is called {unknown[0]!r}; there are {', '.join((*NAMES, *MODELS))}"
        )
    import_torch()
    from ark.bench.modules import measure

    ark.init(backend=args.backend)
    session.device(args.device)
    accelerated = session.backend().name != registry.FALLBACK
    place = torch_device(accelerated) + (f":{args.device}" if accelerated else "")
    probe, machine = session.backend().probe(), session.device(args.device).machine
    empty = results(probe, args.device, machine, args.words, [])
    rows: list[ModuleFigures] = []
    for name in args.names or NAMES:
        rows.append(measure(name, place, args.repeats, bool(args.vs)))
        print("  ".join(_cells(rows[-1])), file=sys.stderr, flush=True)
        write_results(args.json, empty.holding(map(figures_of, rows)), done=False)
    write_results(args.json, empty.holding(map(figures_of, rows)))
    device = probe.devices[args.device].name
    if args.json == "-":
        return 0
    table = Table(title=f"torch.compile on {device}, microseconds a call")
    heads = ("network", "ark", "waited for", "host", "kernel", "kernels", "distance", "torch")
    for head in (*heads, "inductor", "waited for", "inductor / ark"):
        table.add_column(head)
    for row in rows:
        table.add_row(*_cells(row))
    Console(markup=False).print(table)
    return 0


def figures_of(row: ModuleFigures) -> Figure:
    """A network's call as a figure, beside inductor's where that was measured."""
    detail = dataclasses.asdict(row)
    for name in ("name", "call", "peer", "error"):
        del detail[name]
    return figure(f"torch/{row.name}", row.call, "inductor", row.peer, row.error, detail)


def _cells(row: ModuleFigures) -> list[str]:
    if row.error:
        return [row.name, row.error]
    times = [f"{t * 1e6:.1f}" for t in (row.call, row.latency, row.host, row.kernel)]
    cells = [row.name, *times, str(row.kernels), f"{row.distance:.1e}", f"{row.eager * 1e6:.1f}"]
    if row.peer:
        peer = [f"{t * 1e6:.1f}" for t in (row.peer, row.peer_latency)]
        cells += [*peer, f"{row.peer / row.call:.2f}"]
    return cells + ([row.peer_error] if row.peer_error else [])
