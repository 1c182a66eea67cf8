"""`ark bench torch`: torch.compile's backend "ark" beside "inductor", as a table or JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

import ark
from ark.api import session
from ark.backend import registry
from ark.bench.peer import import_torch, torch_device
from ark.cli.common import positive
from ark.errors import InvalidUsageError

if TYPE_CHECKING:
    from ark.bench.modules import ModuleFigures

NAMES = ("resnet", "mobilenet", "lstm", "bert", "gpt2")


def register(kinds: Any) -> None:
    """Adds `ark bench torch`."""
    p = kinds.add_parser("torch", help="torch.compile by ark and by inductor, five small networks")
    p.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all")
    p.add_argument("--vs", choices=("inductor",), help="measure the peer in the same run")
    p.add_argument("--repeats", type=positive, default=5)
    p.add_argument("--backend")
    p.add_argument("--device", type=int, default=0, metavar="I", help="device index")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    unknown = [n for n in args.names if n not in NAMES]
    if unknown:
        raise InvalidUsageError(
            f"no network is called {unknown[0]!r}; there are {', '.join(NAMES)}"
        )
    import_torch()
    from ark.bench.modules import measure

    ark.init(backend=args.backend)
    session.device(args.device)
    accelerated = session.backend().name != registry.FALLBACK
    place = torch_device(accelerated) + (f":{args.device}" if accelerated else "")
    rows: list[ModuleFigures] = []
    for name in args.names or NAMES:
        rows.append(measure(name, place, args.repeats, bool(args.vs)))
        print("  ".join(_cells(rows[-1])), file=sys.stderr, flush=True)
    probe = session.backend().probe()
    device = probe.devices[args.device].name
    if args.json:
        each = [dataclasses.asdict(r) for r in rows]
        print(json.dumps({"device": device, "peer": args.vs, "rows": each}))
        return 0
    table = Table(title=f"torch.compile at batch 1 on {device}, microseconds a call")
    heads = ("network", "ark", "waited for", "host", "kernel", "kernels", "distance", "torch")
    for head in (*heads, "inductor", "waited for", "inductor / ark"):
        table.add_column(head)
    for row in rows:
        table.add_row(*_cells(row))
    Console(markup=False).print(table)
    return 0


def _cells(row: ModuleFigures) -> list[str]:
    if row.error:
        return [row.name, row.error]
    times = [f"{t * 1e6:.1f}" for t in (row.call, row.latency, row.host, row.kernel)]
    cells = [row.name, *times, str(row.kernels), f"{row.distance:.1e}", f"{row.eager * 1e6:.1f}"]
    if row.peer:
        peer = [f"{t * 1e6:.1f}" for t in (row.peer, row.peer_latency)]
        cells += [*peer, f"{row.peer / row.call:.2f}"]
    return cells + ([row.peer_error] if row.peer_error else [])
