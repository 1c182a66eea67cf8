"""Topologies as JSON, in and out.

{"name": "pair", "nodes": [{"id": "g0", "kind": "rank"}, ...], "links": [{"src": "g0", "dst": "s0",
"bandwidth": 300, "latency_us": 0.7, "duplex": true}, ...]}. A bandwidth is an integer or "a/b", in
GB/s; `duplex` adds the reverse link. `boxes`, lists of rank ids, says which ranks share a machine.
`name`, `latency_us` (0), `duplex` (false) and `boxes` (none) may be left out.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from typing import Any

from ark.comm.topology.model import Link, Topology, TopologyError, exact_bandwidth

_FRACTION = re.compile(r"[+-]?\d+(/\d+)?")


def from_json(source: str | dict[str, Any], name: str = "topology") -> Topology:
    """Returns the topology in JSON text or in a parsed object; TopologyError says what is wrong.

    name: its name where the JSON gives none.
    """
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (json.JSONDecodeError, RecursionError) as error:
            raise TopologyError("not JSON", f"the topology cannot be parsed: {error}.") from error
    top = _fields(
        source, "the topology", {"nodes": list, "links": list}, {"name": str, "boxes": list}
    )
    ranks: list[str] = []
    switches: list[str] = []
    for index, entry in enumerate(top["nodes"]):
        node = _fields(entry, f"nodes[{index}]", {"id": str, "kind": str}, {})
        if node["kind"] not in ("rank", "switch"):
            raise TopologyError(
                "unknown kind",
                f"node {node['id']!r} is of kind {node['kind']!r}; expected 'rank' or 'switch'.",
            )
        (ranks if node["kind"] == "rank" else switches).append(node["id"])
    links: list[Link] = []
    for index, entry in enumerate(top["links"]):
        links.extend(_links(entry, f"links[{index}]"))
    name = top.get("name", name)
    return Topology(name, tuple(ranks), tuple(switches), tuple(links), _boxes(top.get("boxes", [])))


def _boxes(value: list[Any]) -> tuple[tuple[str, ...], ...]:
    for box in value:
        if not isinstance(box, list) or not all(isinstance(rank, str) for rank in box):
            raise TopologyError("bad boxes", f"boxes has {box!r:.60}; expected a list of rank ids.")
    return tuple(tuple(box) for box in value)


def to_json(topology: Topology) -> str:
    """Returns the JSON text, of which `from_json` makes an equal topology.

    One node or link a line; a link and its equal reverse share one.
    """
    nodes = [{"id": node, "kind": "rank"} for node in topology.ranks]
    nodes += [{"id": node, "kind": "switch"} for node in topology.switches]
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
    lines.append("]}" if not topology.boxes else f'], "boxes": {json.dumps(topology.boxes)}}}')
    return "\n".join(lines) + "\n"


def _links(entry: Any, where: str) -> list[Link]:
    fields = _fields(
        entry,
        where,
        {"src": str, "dst": str, "bandwidth": (int, float, str)},
        {"latency_us": (int, float), "duplex": bool},
    )
    src, dst = fields["src"], fields["dst"]
    bandwidth = parse_bandwidth(fields["bandwidth"], f"link {src} -> {dst}")
    latency = float(fields.get("latency_us", 0.0))
    links = [Link(src, dst, bandwidth, latency)]
    if fields.get("duplex", False):
        links.append(Link(dst, src, bandwidth, latency))
    return links


def parse_bandwidth(value: int | float | str, where: str) -> Fraction:
    """Returns the bandwidth, GB/s, of an integer or "a/b"; `where` opens the error's sentence."""
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


def _fields(
    entry: Any, where: str, required: dict[str, Any], optional: dict[str, Any]
) -> dict[str, Any]:
    """Returns `entry` after checking that it is an object with just these fields and types."""
    if not isinstance(entry, dict):
        raise TopologyError("bad field", f"{where} is {entry!r}; expected a JSON object.")
    allowed = {**required, **optional}
    for key in entry:
        if key not in allowed:
            raise TopologyError(
                "unknown field", f"{where} has {key!r}; expected only {', '.join(allowed)}."
            )
    for key in required:
        if key not in entry:
            raise TopologyError("missing field", f"{where} has no {key!r}.")
    for key, value in entry.items():
        kinds = allowed[key] if isinstance(allowed[key], tuple) else (allowed[key],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(kind.__name__ for kind in kinds)
            raise TopologyError("bad field", f"{where} has {key} {value!r}; expected {names}.")
    return entry
