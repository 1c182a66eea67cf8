"""Builds topologies of machines with several accelerators (boxes), and of the fabrics (networks)
that connect the machines. `nvlink_boxes("a100", boxes=2)` and `topology_of_boxes` make topologies;
`ark.collective.topology.names` turns names such as "a100x2" into calls of these functions.
Bandwidths are the usual data-sheet figures in GB/s each way.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from ark.collective.topology.model import Link, Topology
from ark.collective.topology.shapes import duplex
from ark.errors import InvalidUsageError

FABRICS = ("flat", "rail", "leafspine")
ABILITIES = ("plain", "multicast", "reducing")
DIRECT_LATENCY_US = 0.7
SWITCH_HOP_LATENCY_US = 0.35
NIC_HOP_LATENCY_US = 0.85

# The links inside a box of MI250 as (die, die, number of links). Package i has the dies 2i and 2i +
# 1. Each die has three links to dies in other packages.
_MI250 = tuple(
    [(2 * i, 2 * i + 1, 4) for i in range(8)]
    + [(2 * i, (2 * i + 3) % 16, 1) for i in range(8)]
    + [(2 * i, (2 * i + 7) % 16, 1) for i in range(8)]
    + [(die, die + 8, 1) for die in range(8)]
)
# The hybrid cube mesh of a DGX-1 with V100 GPUs, which have six links each.
_CUBE_MESH = (
    *((0, 1, 1), (0, 2, 1), (0, 3, 2), (0, 4, 2), (1, 2, 2), (1, 3, 1), (1, 5, 2), (2, 3, 2)),
    *((2, 6, 1), (3, 7, 1), (4, 5, 1), (4, 6, 1), (4, 7, 2), (5, 6, 2), (5, 7, 1), (6, 7, 2)),
)
_MESH_OF_8 = tuple((a, b, 1) for a, b in itertools.combinations(range(8), 2))


@dataclass(frozen=True)
class Box:
    """One machine, with `gpus` ranks and `nics` network ports (NICs). A switch or direct links
    connect its ranks.

    If a switch connects the ranks, `link` is the bandwidth of a rank's port on the switch.
    Otherwise `wiring` lists the direct links as (a, b, number of links), and `link` is the
    bandwidth of one of them. If there are fewer NICs than ranks, neighbouring ranks share a NIC
    through a separate switch. All bandwidths are in GB/s each way.
    """

    kind: str
    gpus: int
    link: Fraction
    nics: int
    nic: Fraction
    wiring: tuple[tuple[int, int, int], ...] = ()


def _box(
    kind: str,
    gpus: int,
    link: int,
    nics: int,
    nic: Fraction | int,
    wiring: tuple[tuple[int, int, int], ...] = (),
) -> Box:
    return Box(kind, gpus, Fraction(link), nics, Fraction(nic), wiring)


BOXES = {
    box.kind: box
    for box in (
        _box("a100", 8, 300, 8, 25),
        _box("h100", 8, 450, 8, 50),
        _box("h200", 8, 450, 8, 50),
        _box("b200", 8, 900, 8, 50),
        _box("dgx2", 16, 150, 8, Fraction(25, 2)),
        _box("dgx1v", 8, 25, 4, Fraction(25, 2), _CUBE_MESH),
        _box("ndv2", 8, 25, 1, Fraction(25, 2), _CUBE_MESH),
        _box("mi250", 16, 50, 16, 16, _MI250),
        _box("mi300x", 8, 64, 8, 50, _MESH_OF_8),
    )
}


def nvlink_boxes(
    kind: str,
    boxes: int = 1,
    gpus: int | None = None,
    link: Fraction | int | None = None,
    nics: int | None = None,
    nic: Fraction | int | None = None,
    fabric: str = "flat",
    oversubscription: Fraction | int = 1,
) -> Topology:
    """Returns `boxes` boxes of one kind in BOXES, connected as by `topology_of_boxes`.

    The other arguments replace the kind's own figures. `gpus` can differ only if a switch connects
    the ranks of a box.
    """
    box = customise(box_of_kind(kind), gpus=gpus, link=link, nics=nics, nic=nic)
    if boxes < 1:
        raise InvalidUsageError(f"{kind}: boxes={boxes} must be at least 1.")
    return topology_of_boxes([box] * boxes, fabric, oversubscription)


def box_of_kind(kind: str) -> Box:
    """Returns the box of that kind. For an unknown kind, raises InvalidUsageError that lists the
    known ones.
    """
    if kind not in BOXES:
        raise InvalidUsageError(f"{kind!r} is not a box; choose one of {', '.join(BOXES)}.")
    return BOXES[kind]


def customise(
    box: Box,
    gpus: int | None = None,
    link: Fraction | int | None = None,
    nics: int | None = None,
    nic: Fraction | int | None = None,
) -> Box:
    """Returns a copy of the box. Arguments that are not None replace the box's own figures."""
    if gpus is not None and gpus != box.gpus:
        if box.wiring:
            raise InvalidUsageError(
                f"{box.kind} has {box.gpus} ranks wired to each other; gpus={gpus} needs a box "
                "whose ranks share a switch."
            )
        if gpus < 1:
            raise InvalidUsageError(f"{box.kind}: gpus={gpus} must be at least 1.")
        box = replace(box, gpus=gpus, nics=min(box.nics, gpus))
    if nics is not None:
        if not 1 <= nics <= box.gpus or box.gpus % nics:
            raise InvalidUsageError(
                f"{box.kind}: nics={nics}; expected a divisor of its {box.gpus} ranks."
            )
        box = replace(box, nics=nics)
    if link is not None:
        box = replace(box, link=Fraction(link))
    if nic is not None:
        box = replace(box, nic=Fraction(nic))
    return box


def topology_of_boxes(
    boxes: Sequence[Box],
    fabric: str = "flat",
    oversubscription: Fraction | int = 1,
    inside: str = "plain",
    between: str = "plain",
) -> Topology:
    """Returns boxes, of any mix of kinds, on one fabric. A single box has no fabric.

    Fabrics: "flat", one switch "net" that every NIC reaches; "rail", a switch "rail<i>" that
    connects NIC i of all boxes; "leafspine", a switch "leaf<b>" per box whose uplink to "spine" has
    the sum of the bandwidths of the box's NICs divided by `oversubscription`. inside, between: what
    the switches inside boxes (inside) and the switches of the fabric (between) can do: "plain",
    "multicast", or "reducing", which means multicast and sum (as NVLS does inside boxes and SHARP
    in fabrics).
    """
    if not boxes:
        raise InvalidUsageError("a topology of boxes needs at least one box.")
    if fabric not in FABRICS:
        raise InvalidUsageError(f"{fabric!r} is not a fabric; choose one of {', '.join(FABRICS)}.")
    if oversubscription < 1 or (oversubscription != 1 and fabric != "leafspine"):
        raise InvalidUsageError(
            f"oversubscription={oversubscription} on a {fabric} fabric is not valid; it must be at "
            "least 1, and 1 except on leafspine."
        )
    for ability in (inside, between):
        if ability not in ABILITIES:
            raise InvalidUsageError(
                f"switches cannot be {ability!r}; they are one of {', '.join(ABILITIES)}."
            )
    ranks: list[str] = []
    switches: list[str] = []
    links: list[Link] = []
    members: list[tuple[str, ...]] = []
    ports: list[list[str]] = []  # for each box, the node behind each NIC
    for number, box in enumerate(boxes):
        own = [f"g{len(ranks) + local}" for local in range(box.gpus)]
        ranks += own
        members.append(tuple(own))
        if box.wiring:
            for a, b, count in box.wiring:
                links += duplex(own[a], own[b], box.link * count, DIRECT_LATENCY_US)
        elif box.gpus > 1:
            switches.append(f"s{number}")
            for rank in own:
                links += duplex(rank, f"s{number}", box.link, SWITCH_HOP_LATENCY_US)
        if len(boxes) > 1:
            ports.append(_nics(number, box, own, switches, links))
    for number, behind in enumerate(ports):
        for index, node in enumerate(behind):
            up = {"flat": "net", "rail": f"rail{index}", "leafspine": f"leaf{number}"}[fabric]
            if up not in switches:
                switches.append(up)
            links += duplex(node, up, boxes[number].nic, NIC_HOP_LATENCY_US)
        if fabric == "leafspine":
            if number == 0:
                switches.append("spine")
            uplink = boxes[number].nic * boxes[number].nics / Fraction(oversubscription)
            links += duplex(f"leaf{number}", "spine", uplink, NIC_HOP_LATENCY_US)
    kinds = [(kind, len(list(run))) for kind, run in itertools.groupby(box.kind for box in boxes)]
    name = "+".join(kind if count == 1 else f"{kind}x{count}" for kind, count in kinds)
    able = {s: inside if re.fullmatch(r"s\d+", s) else between for s in switches}
    return Topology(
        name,
        tuple(ranks),
        tuple(switches),
        tuple(links),
        tuple(members),
        tuple(s for s in switches if able[s] != "plain" and not s.startswith("nic")),
        tuple(s for s in switches if able[s] == "reducing" and not s.startswith("nic")),
    )


def _nics(
    number: int, box: Box, own: list[str], switches: list[str], links: list[Link]
) -> list[str]:
    """Adds the switches by which several ranks share a NIC. Returns, for each NIC of the box, the
    node to which it is attached: a rank, or such a switch.
    """
    if box.nics == box.gpus:
        return own
    shared = []
    per_nic = box.gpus // box.nics
    for index in range(box.nics):
        node = f"nic{number}.{index}"
        switches.append(node)
        shared.append(node)
        for rank in own[index * per_nic : (index + 1) * per_nic]:
            links += duplex(rank, node, box.nic, SWITCH_HOP_LATENCY_US)
    return shared
