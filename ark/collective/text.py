"""Programs as text for people and as JSON for files; both are the same bytes for equal programs.

`ark topo synthesize` writes these; `from_json` reads them back and refuses what it does not know.
"""

from __future__ import annotations

import json
from typing import Any

from ark.collective.order import show, steps
from ark.collective.types import (
    Buffer,
    Collective,
    CollectiveProgram,
    Kind,
    Operation,
    OpRef,
    Role,
    Span,
)
from ark.errors import ModelError

FORMAT = "ark.collective_program"


def dump(program: CollectiveProgram) -> str:
    """Returns the program as text: a line an operation, its step, waits, signals and route."""
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
            told = sorted(signals.get(ref, set()))
            line += f"  signal {' '.join(f'r{r}' for r in told)}" if told else ""
            line += f"  via {'>'.join(op.route)}" if op.route else ""
            lines.append(line)
    return "\n".join(lines) + "\n"


def to_json(program: CollectiveProgram) -> str:
    """Returns the program as JSON text, one operation a line."""
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


def from_json(text: str) -> CollectiveProgram:
    """Reads what `to_json` writes; run `check` on the result before trusting it.

    Raises ModelError, naming the place, on anything that is not such a program.
    """
    try:
        raw = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"The collective program is not valid JSON: {error}.") from error
    top = _Reader(raw, "the program")
    if top.get("format", str) != FORMAT:
        raise ModelError(f'The file is no collective program: its "format" is not "{FORMAT}".')
    program = CollectiveProgram(
        name=top.get("name", str),
        collective=top.choice("collective", Collective),
        ranks=top.get("ranks", int),
        chunks=top.get("chunks", int),
        pieces=top.get("pieces", int, 1),
        reduction=top.get("reduction", str, None),
        root=top.get("root", int, None),
        buffers=tuple(_read_buffer(b, i) for i, b in enumerate(top.get("buffers", list))),
        operations=tuple(
            tuple(_read_operation(op, rank, i) for i, op in enumerate(_list(ops, f"rank {rank}")))
            for rank, ops in enumerate(top.get("operations", list))
        ),
    )
    top.end()
    return program


_REQUIRED = object()


class _Reader:
    """Takes the fields of a JSON object one by one and complains about what is left."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, dict):
            raise ModelError(f"In {where} an object was expected, but there is {_brief(raw)}.")
        self.raw, self.where = dict(raw), where

    def get(self, key: str, kind: type, default: Any = _REQUIRED) -> Any:
        value = self.raw.pop(key, default)
        if value is _REQUIRED:
            raise ModelError(f'{self.where[0].upper()}{self.where[1:]} lacks the field "{key}".')
        if value is default or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        if value is None and default is None:
            return None
        raise ModelError(
            f'In {self.where} the field "{key}" must be {kind.__name__}, not {_brief(value)}.'
        )

    def choice(self, key: str, kind: Any) -> Any:
        value = self.get(key, str)
        names = [item.value for item in kind]
        if value not in names:
            raise ModelError(
                f'In {self.where} the field "{key}" is {_brief(value)}; it must be one of '
                f"{', '.join(names)}."
            )
        return kind(value)

    def end(self) -> None:
        if self.raw:
            raise ModelError(f"In {self.where} there is the unknown field {_brief(min(self.raw))}.")


def _brief(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise ModelError(f"In {where} a list was expected, but there is {_brief(raw)}.")
    return raw


def _read_buffer(raw: Any, index: int) -> Buffer:
    reader = _Reader(raw, f"buffer {index}")
    buffer = Buffer(reader.get("name", str), reader.choice("role", Role), reader.get("slots", int))
    reader.end()
    return buffer


def _read_span(raw: Any, where: str) -> Span:
    if not isinstance(raw, list) or [type(x) for x in raw] != [str, int, int]:
        raise ModelError(f"In {where} a span [buffer, start, count] must not be {_brief(raw)}.")
    return Span(*raw)


def _read_operation(raw: Any, rank: int, index: int) -> Operation:
    where = f"rank {rank} operation {index}"
    reader = _Reader(raw, where)
    deps = reader.get("deps", list, [])
    if any(not isinstance(d, list) or [type(x) for x in d] != [int, int] for d in deps):
        raise ModelError(f"In {where} the dependencies must be a list of [rank, operation].")
    route = reader.get("route", list, [])
    if any(not isinstance(node, str) for node in route):
        raise ModelError(f"In {where} the route must be a list of node names.")
    op = Operation(
        kind=reader.choice("kind", Kind),
        srcs=tuple(_read_span(s, where) for s in reader.get("srcs", list)),
        dst=_read_span(reader.get("dst", list), where),
        peer=reader.get("peer", int, None),
        deps=tuple(OpRef(*d) for d in deps),
        reduce=reader.get("reduce", str, None),
        divide=reader.get("divide", int, 1),
        route=tuple(route),
    )
    reader.end()
    return op
