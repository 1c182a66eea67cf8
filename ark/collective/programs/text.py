"""Writes programs as text for people and as JSON for files. Equal programs give equal bytes.

`ark topo synthesize` writes both forms. `from_json` reads the JSON and refuses unknown fields.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from ark.collective.programs.order import show, steps
from ark.collective.programs.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Counts,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
)
from ark.ir.json_reader import Closed, read

FORMAT = "ark.collective_program"


def dump(program: CollectiveProgram) -> str:
    """Returns the program as text: one line per operation, with its step, waits, signals
    and route.
    """
    p = program
    step = steps(p)
    signals: dict[OpRef, set[int]] = {}
    for ref in p.refs():
        peer = p.op(ref).peer
        if peer is not None:
            signals.setdefault(ref, set()).add(peer)
        for dep in p.op(ref).deps:
            if dep.rank != ref.rank:
                signals.setdefault(dep, set()).add(ref.rank)
    head = f"program {p.name}: {p.collective.value}"
    head += "" if p.reduction is None else f" ({p.reduction})"
    head += "" if p.root is None else f" root {p.root}"
    lines = [head + f", {p.ranks} ranks, {p.chunks} chunks, {p.pieces} pieces"]
    lines += [f"counts {p.counts}"] if p.counts is not None else []
    lines += [f"buffer {b.name}: {b.slots} slots, {b.role.value}" for b in p.buffers]
    for rank, ops in enumerate(p.operations):
        lines.append(f"rank {rank}")
        for index, op in enumerate(ops):
            ref = OpRef(rank, index)
            after = [str(d.position) for d in op.deps if d.rank == rank]
            waits = [f"r{d.rank}.{d.position}" for d in op.deps if d.rank != rank]
            line = f"  {index:4d}  step {step[ref]:3d}  {show(op)}"
            line += f"  after {' '.join(after)}" if after else ""
            line += f"  wait {' '.join(waits)}" if waits else ""
            signalled = sorted(signals.get(ref, set()))
            line += f"  signal {' '.join(f'r{r}' for r in signalled)}" if signalled else ""
            line += f"  via {'>'.join(op.route)}" if op.route else ""
            lines.append(line)
    return "\n".join(lines) + "\n"


def to_json(program: CollectiveProgram) -> str:
    """Returns the program as JSON text, one operation per line."""
    p = program
    head: dict[str, Any] = {
        "format": FORMAT,
        "name": p.name,
        "collective": p.collective.value,
        "ranks": p.ranks,
        "chunks": p.chunks,
        "pieces": p.pieces,
        "reduction": p.reduction,
        "root": p.root,
        **({} if p.counts is None else {"counts": p.counts}),
        "buffers": [{"name": b.name, "role": b.role.value, "slots": b.slots} for b in p.buffers],
    }
    text = json.dumps(head, indent=1)[:-2] + ',\n "operations": [\n'
    ranks = [",\n".join("   " + json.dumps(_operation(op)) for op in ops) for ops in p.operations]
    return text + ",\n".join(f"  [\n{ops}\n  ]" for ops in ranks) + "\n ]\n}\n"


def _operation(op: Operation) -> dict[str, Any]:
    def span(s: Span) -> list[Any]:
        return [s.buffer, s.start, s.count]

    result: dict[str, Any] = {
        "kind": op.kind.value,
        "srcs": [span(s) for s in op.srcs],
        "dst": span(op.dst),
    }
    if op.peer is not None:
        result["peer"] = op.peer
    if op.deps:
        result["deps"] = [list(d) for d in op.deps]
    if op.reduce is not None:
        result["reduce"] = op.reduce
    if op.divide != 1:
        result["divide"] = op.divide
    if op.route:
        result["route"] = list(op.route)
    return result


class _Buffer(Closed, frozen=True):
    name: str
    role: Role
    slots: int


class _Operation(Closed, frozen=True):
    kind: Kind
    srcs: tuple[tuple[str, int, int], ...]
    dst: tuple[str, int, int]
    peer: int | None = None
    deps: tuple[tuple[int, int], ...] = ()
    reduce: str | None = None
    divide: int = 1
    route: tuple[str, ...] = ()


class _Program(Closed, frozen=True):
    format: Literal["ark.collective_program"]
    name: str
    collective: Literal[
        "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"
    ]
    ranks: int
    chunks: int
    buffers: tuple[_Buffer, ...]
    operations: tuple[tuple[_Operation, ...], ...]
    pieces: int = 1
    reduction: str | None = None
    root: int | None = None
    counts: Counts | None = None


def from_json(text: str) -> CollectiveProgram:
    """Reads the output of `to_json`. The program is not checked: call `check` on the result.

    Raises ModelError with the location if the text is not a program in this form.
    """
    form = read(text, _Program, "the collective program")
    return CollectiveProgram(
        name=form.name,
        collective=Collective(form.collective),
        ranks=form.ranks,
        chunks=form.chunks,
        pieces=form.pieces,
        reduction=form.reduction,
        root=form.root,
        counts=form.counts,
        buffers=tuple(Buffer(b.name, b.role, b.slots) for b in form.buffers),
        operations=tuple(tuple(map(_read_operation, ops)) for ops in form.operations),
    )


def _read_operation(op: _Operation) -> Operation:
    return Operation(
        kind=op.kind,
        srcs=tuple(Span(*span) for span in op.srcs),
        dst=Span(*op.dst),
        peer=op.peer,
        deps=tuple(OpRef(*dep) for dep in op.deps),
        reduce=op.reduce,
        divide=op.divide,
        route=op.route,
    )
