"""Reads and writes topologies as JSON.

{"name": "pair", "nodes": [{"id": "g0", "kind": "rank"}, ...], "links": [{"src": "g0", "dst": "s0",
"bandwidth": 300, "latency_us": 0.7, "duplex": true}, ...]}. A bandwidth is an integer or "a/b", in
GB/s; `duplex` adds the reverse link. `boxes` has a list of rank ids for each machine.
A switch may have `multicast` and `reduces` (true or false). `costs` is a `CostModel` without ports.
Optional are `name`, `latency_us` (default 0), `duplex` (false), `boxes` and `costs`.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Annotated, Any, Literal

import msgspec

from ark.collective.topology.costs import CostModel, Protocol
from ark.collective.topology.model import Link, Topology, TopologyError, exact_bandwidth
from ark.ir.json_reader import Closed, FormError, read

_FRACTION = re.compile(r"[+-]?\d+(/\d+)?")
_Us = Annotated[float, msgspec.Meta(ge=0)]
_Above0 = Annotated[float, msgspec.Meta(gt=0)]


class _Node(Closed, frozen=True):
    id: str
    kind: Literal["rank", "switch"]
    multicast: bool = False
    reduces: bool = False


class _Link(Closed, frozen=True):
    src: str
    dst: str
    bandwidth: int | float | str
    latency_us: float = 0.0
    duplex: bool = False


class _Protocol(Closed, frozen=True):
    name: str
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    latency_us: _Us = 0.0


class _Costs(Closed, frozen=True):
    put_overhead_us: _Us = 0.0
    local_gbps: _Above0 | None = None
    protocols: Annotated[tuple[_Protocol, ...], msgspec.Meta(min_length=1)] = (_Protocol("simple"),)


class _Network(Closed, frozen=True):
    nodes: tuple[_Node, ...]
    links: tuple[_Link, ...]
    name: str | None = None
    boxes: tuple[tuple[str, ...], ...] = ()
    costs: _Costs | None = None


# Errors in these fields begin with the kind of error (the value here), in addition to the location.
_FAULTS = {"kind": "unknown kind", "bandwidth": "bad bandwidth", "latency_us": "bad latency"}


def from_json(source: str | dict[str, Any], name: str = "topology") -> Topology:
    """Returns the topology in JSON text or in a parsed object. Raises TopologyError with the fault.

    name: the topology's name if the JSON has none.
    """
    try:
        form = read(source, _Network, "the topology")
    except FormError as error:
        fault = error.fault
        if fault == "bad field":
            fault = _FAULTS.get(error.place.rpartition(".")[2], fault)
            fault = "bad boxes" if error.place.startswith("$.boxes") else fault
        raise TopologyError(fault, f"{error.message}.") from None
    costs = None
    if form.costs is not None:
        protocols = tuple(Protocol(p.name, p.share, p.latency_us) for p in form.costs.protocols)
        costs = CostModel(form.costs.put_overhead_us, form.costs.local_gbps, protocols)
    return Topology(
        form.name if form.name is not None else name,
        tuple(node.id for node in form.nodes if node.kind == "rank"),
        tuple(node.id for node in form.nodes if node.kind == "switch"),
        tuple(link for entry in form.links for link in _links(entry)),
        form.boxes,
        tuple(node.id for node in form.nodes if node.multicast),
        tuple(node.id for node in form.nodes if node.reduces),
        costs,
    )


def to_json(topology: Topology) -> str:
    """Returns the topology as JSON text. `from_json` reads it as an equal topology.

    There is one node or link per line. A link and an equal reverse link share a line.
    """
    nodes: list[dict[str, Any]] = [{"id": node, "kind": "rank"} for node in topology.ranks]
    for node in topology.switches:
        nodes.append({"id": node, "kind": "switch"})
        nodes[-1].update({"multicast": True} if node in topology.multicast else {})
        nodes[-1].update({"reduces": True} if node in topology.reduces else {})
    links: list[dict[str, Any]] = []
    index = 0
    while index < len(topology.links):
        link = topology.links[index]
        back = Link(link.dst, link.src, link.bandwidth, link.latency_us)
        duplex = topology.links[index + 1 : index + 2] == (back,)
        whole = link.bandwidth.denominator == 1
        entry: dict[str, Any] = {"src": link.src, "dst": link.dst}
        entry["bandwidth"] = int(link.bandwidth) if whole else str(link.bandwidth)
        entry["latency_us"] = link.latency_us
        if duplex:
            entry["duplex"] = True
        links.append(entry)
        index += 1 + duplex
    lines = [f'{{"name": {json.dumps(topology.name)}, "nodes": [']
    lines.append(",\n".join(f"  {json.dumps(node)}" for node in nodes))
    lines.append('], "links": [')
    lines.append(",\n".join(f"  {json.dumps(link)}" for link in links))
    boxes = f', "boxes": {json.dumps(topology.boxes)}' if topology.boxes else ""
    lines.append(f"]{boxes}{_costs(topology.costs)}}}")
    return "\n".join(lines) + "\n"


def _costs(costs: CostModel | None) -> str:
    if costs is None:
        return ""
    form = _Costs(
        costs.put_overhead_us,
        costs.local_gbps,
        tuple(_Protocol(p.name, p.share, p.latency_us) for p in costs.protocols),
    )
    return f', "costs": {msgspec.json.encode(form).decode()}'


def _links(entry: _Link) -> list[Link]:
    bandwidth = parse_bandwidth(entry.bandwidth, f"link {entry.src} -> {entry.dst}")
    links = [Link(entry.src, entry.dst, bandwidth, entry.latency_us)]
    if entry.duplex:
        links.append(Link(entry.dst, entry.src, bandwidth, entry.latency_us))
    return links


def parse_bandwidth(value: int | float | str, where: str) -> Fraction:
    """Returns a bandwidth in GB/s, given as an integer or "a/b". where: the beginning of the
    error's sentence.
    """
    if not isinstance(value, str):
        return exact_bandwidth(value, where)
    try:
        if not _FRACTION.fullmatch(value):
            raise ValueError
        return exact_bandwidth(Fraction(value), where)
    except (ValueError, ZeroDivisionError):
        raise TopologyError(
            "bad bandwidth",
            f'{where} has {value!r:.60}; expected an integer or "a/b" in GB/s, 1/10^9 to 10^9.',
        ) from None
