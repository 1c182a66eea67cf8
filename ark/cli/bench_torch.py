"""`ark bench torch`: compares torch.compile's backend "ark" with "inductor", and prints a table or
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ark
from ark.backend import registry
from ark.cli.common import output, write_results
from ark.cli.measure.peer import import_torch, torch_device
from ark.cli.measure.results import Figure, Results, figure, read, results
from ark.cli.measure.turn import Turn
from ark.cli.parser import Subparsers, add_measurement, option
from ark.cli.tables import FigureTable
from ark.errors import InvalidUsageError
from ark.runtime import session

if TYPE_CHECKING:
    from ark.cli.measure.modules import ModuleFigures

NAMES = ("resnet", "mobilenet", "lstm", "bert", "gpt2")


def register(kinds: Subparsers) -> None:
    """Adds `ark bench torch`."""
    p = kinds.add_parser("torch", help="torch.compile by ark and by inductor, small networks")
    add_networks(p, "networks", NAMES, ("inductor",))
    p.set_defaults(func=run)


def add_networks(
    p: argparse.ArgumentParser, kind: str, names: Iterable[str], peers: Sequence[str]
) -> None:
    """Adds the arguments of a command that compares networks with a peer. kind: the networks in
    help texts.
    """
    p.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{kind}: {', '.join(names)} (default: all)"
    )
    option(p, "--vs", "measure the peer in the same run (default: no)", choices=peers)
    add_measurement(p)


def run(args: argparse.Namespace) -> int:
    check_names(args.names, NAMES)
    import_torch()
    from ark.cli.measure.modules import measure

    peer, turn = args.vs or "", Turn(args.turn)
    measured = measure_each(
        args, NAMES, lambda name, place: measure(name, place, args.repeats, peer, turn)
    )
    if args.json == "-":
        return 0
    show(measured.device, peer, measured.rows)
    return 0


def show(device: str, peer: str, rows: Sequence[ModuleFigures]) -> None:
    """Prints a table, and the errors of what could not be measured."""
    title = f"torch.compile on {device}, microseconds a call"
    heads = ("network", "ark", "waited for", "host", "kernel", "kernels", "distance", "torch")
    table = FigureTable(title, (*heads, *((peer, "waited for", f"{peer} / ark") if peer else ())))
    for row in rows:
        if not row.error:
            table.add_row(*_cells(row))
    if table.rows:
        output().print(table)
    for row in rows:
        for error in filter(None, (row.error, row.peer_error)):
            print(f"{row.name}: {error}")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The result of a command. device: the device's name. figures: all records, including those of
    an earlier run that this run continues. rows: the measurements of the networks that this run
    measured.
    """

    device: str
    figures: list[Figure]
    rows: list[ModuleFigures]


def check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Raises InvalidUsageError for a name that is not in `known`."""
    unknown = [n for n in names if n not in known]
    if unknown:
        raise InvalidUsageError(
            f"the network {unknown[0]!r} does not exist; choose one of {', '.join(known)}"
        )


def measure_each(
    args: argparse.Namespace,
    names: Iterable[str],
    measure: Callable[[str, str], ModuleFigures],
    resume: bool = False,
    suffix: str = "",
) -> Measured:
    """Measures the networks that `args` names (all of `names` by default) on a device of torch, and
    writes the results to the file args.json. resume: True to reuse results that this file already
    has, if ark, torch and the machine are the same. suffix: the text that `measure` appends to a
    network's name.
    """
    ark.init(backend=args.backend)
    session.device(args.device)
    accelerated = session.backend().name != registry.FALLBACK
    place = torch_device(accelerated) + (f":{args.device}" if accelerated else "")
    probe, machine = session.backend().probe(), session.device(args.device).machine
    empty = results(probe, args.device, machine, args.words, [])
    kept = _kept(args.json, empty, args.vs or "") if resume else []
    done, rows = {f.figure for f in kept}, []
    left = [n for n in args.names or names if f"torch/{n}{suffix}" not in done]
    for number, name in enumerate(left, 1):
        print(f"{number} of {len(left)}: {name}", file=sys.stderr, flush=True)
        rows.append(measure(name, place))
        kept.append(figures_of(rows[-1], args.vs or "inductor"))
        write_results(args.json, empty.holding(kept), done=False)
    write_results(args.json, empty.holding(kept))
    return Measured(probe.devices[args.device].name, kept, rows)


def _kept(path: str | None, now: Results, peer: str) -> list[Figure]:
    """The records of an earlier run that can be reused. That run had the same source, versions and
    machine. A record is reused if it has a time and, if a peer is requested, the peer's time.
    """
    if not path or not Path(path).is_file():
        return []
    before = read(Path(path))
    now_of, before_of = ((r.machine, r.source, r.versions) for r in (now, before))
    if now_of != before_of:
        return []
    return [
        f
        for f in before.figures
        if f.us and (not peer or f.peer == peer or f.detail.get("peer_error"))
    ]


def figures_of(row: ModuleFigures, peer: str = "inductor") -> Figure:
    """The measurement of one network as a record (Figure) for the JSON file: the time of a call,
    and the peer's time if it was measured.
    """
    detail = dataclasses.asdict(row)
    for name in ("name", "call", "peer", "error"):
        del detail[name]
    return figure(f"torch/{row.name}", row.call, peer, row.peer, row.error, detail)


def _cells(row: ModuleFigures) -> list[str]:
    times = [f"{t * 1e6:.1f}" for t in (row.call, row.latency, row.host, row.kernel)]
    cells = [row.name, *times, str(row.kernels), f"{row.distance:.1e}", f"{row.eager * 1e6:.1f}"]
    if row.peer:
        peer = [f"{t * 1e6:.1f}" for t in (row.peer, row.peer_latency)]
        cells += [*peer, f"{row.peer / row.call:.2f}"]
    return cells
