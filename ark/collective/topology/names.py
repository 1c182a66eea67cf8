"""Finds topologies by name, for the command line, tests and benchmarks. A name is "h100x4",
"torus4x4" or a file, for example.
"""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from ark.collective.topology import shapes
from ark.collective.topology.boxes import (
    ABILITIES,
    BOXES,
    FABRICS,
    Box,
    box_of_kind,
    customise,
    topology_of_boxes,
)
from ark.collective.topology.detect import detect
from ark.collective.topology.json_form import from_json, parse_bandwidth
from ark.collective.topology.model import Topology, TopologyError
from ark.errors import InvalidUsageError

GRAMMAR = f"""\
a JSON file, or a name:
  BOX[xN][+BOX[xN]...][:KEY=VALUE[,KEY=VALUE...]]
      N boxes of a kind, or of several kinds in turn, on one fabric
      BOX  {", ".join(BOXES)}
      KEY  fabric ({", ".join(FABRICS)}),
           oversubscription (leafspine; 2 or 3/2), gpus, nics (a box),
           link, nic (GB/s; 25 or 25/2),
           inside, between ({", ".join(ABILITIES)}; what the
           switches of boxes and of the fabric do)
  ringN, fullN, starN, hypercubeD, meshAxB[xC...], torusAxB[xC...], fattreePxLxN
  [:bandwidth=GB/s,latency=us]
      N ranks in a cycle, all linked, on one switch; 2^D ranks; grids; P pods
      of L leaves of N ranks
  detect
      this machine's own devices and links
for example h100x4, a100x2+h100x2:fabric=rail, dgx2x2:nic=25/2 and
torus4x4:bandwidth=50"""

_SHAPES = {
    "ring": shapes.ring,
    "full": shapes.full_mesh,
    "star": shapes.star,
    "hypercube": shapes.hypercube,
}
_GRIDS = {"mesh": shapes.mesh, "torus": shapes.torus, "fattree": shapes.fat_tree}
_MOST_RANKS = 1 << 16


def load(source: str) -> Topology:
    """Returns the topology in the JSON file at `source`. If there is no such file, returns the
    topology with the name `source`.

    Raises InvalidUsageError if it is neither, and TopologyError if the file contradicts itself.
    """
    path = Path(source)
    if source.endswith(".json") or path.is_file():
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidUsageError(
                f"the topology file {source} cannot be read: {error}."
            ) from None
        try:
            return from_json(text, path.stem)
        except TopologyError as error:
            raise TopologyError(error.fault, f"in {source}, {error.message}") from None
    return named(source)


def named(name: str) -> Topology:
    """Returns the topology that has this name in GRAMMAR. Raises InvalidUsageError for other
    names.
    """
    body, _, tail = name.partition(":")
    if body == "detect" and not tail:
        return detect()
    options = _options(name, tail)
    shape = re.fullmatch(r"([a-z]+)(\d{1,6}(?:x\d{1,6})*)", body)
    if shape and shape[1] in (*_SHAPES, *_GRIDS):
        topology = _shape(name, shape[1], [int(size) for size in shape[2].split("x")], options)
    else:
        topology = _boxes(name, body, options)
    return replace(topology, name=name)


def _shape(name: str, kind: str, sizes: list[int], options: dict[str, str]) -> Topology:
    arguments: dict[str, Any] = {}
    for key, value in options.items():
        if key == "bandwidth":
            arguments["bandwidth"] = parse_bandwidth(value, f"{name}: bandwidth")
        elif key == "latency":
            arguments["latency_us"] = _number(name, key, value, float)
        else:
            raise _unknown(name, key, "bandwidth and latency")
    if kind in _GRIDS:
        ranks = 1
        for size in sizes:
            ranks *= size
        _check_size(name, ranks)
        return _GRIDS[kind](sizes, **arguments)
    if len(sizes) != 1:
        raise InvalidUsageError(f"{name}: {kind} takes one number; see `ark topo --help`.")
    _check_size(name, 1 << min(sizes[0], 64) if kind == "hypercube" else sizes[0])
    return _SHAPES[kind](sizes[0], **arguments)


def _boxes(name: str, body: str, options: dict[str, str]) -> Topology:
    boxes: list[Box] = []
    changes: dict[str, Any] = {}
    fabric = options.pop("fabric", "flat")
    oversubscription = Fraction(1)
    able = {}
    for key, value in options.items():
        if key in ("gpus", "nics"):
            changes[key] = _number(name, key, value, int)
        elif key in ("link", "nic"):
            changes[key] = parse_bandwidth(value, f"{name}: {key}")
        elif key in ("inside", "between"):
            able[key] = value
        elif key == "oversubscription":
            oversubscription = parse_bandwidth(value, f"{name}: {key}")
        else:
            raise _unknown(
                name, key, "fabric, oversubscription, gpus, nics, link, nic, inside and between"
            )
    for word in body.split("+"):
        match = re.fullmatch(rf"({'|'.join(BOXES)})(?:x(\d{{1,6}}))?", word)
        if not match:
            raise InvalidUsageError(
                f"{name!r} is neither a file nor the name of a topology; `ark topo --help` "
                "lists the names, for example h100x4, mi300x, ring8, torus4x4."
            )
        box = customise(box_of_kind(match[1]), **changes)
        count = int(match[2] or 1)
        if count < 1:
            raise InvalidUsageError(
                f"{name}: the number of boxes is {count}; it must be at least 1."
            )
        _check_size(name, count * box.gpus)
        boxes += [box] * count
    return topology_of_boxes(boxes, fabric, oversubscription, **able)


def _options(name: str, tail: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in tail.split(",") if tail else ():
        key, equals, value = word.partition("=")
        if not equals or key in options:
            raise InvalidUsageError(f"{name}: {word!r} is not KEY=VALUE, or repeats a key.")
        options[key] = value
    return options


def _number(name: str, key: str, value: str, kind: type[int] | type[float]) -> int | float:
    try:
        return kind(value)
    except ValueError:
        raise InvalidUsageError(f"{name}: {key} is {value!r}; expected a number.") from None


def _check_size(name: str, ranks: int) -> None:
    if ranks > _MOST_RANKS:
        raise InvalidUsageError(
            f"{name} has {ranks} ranks or more; at most {_MOST_RANKS} are supported."
        )


def _unknown(name: str, key: str, known: str) -> InvalidUsageError:
    return InvalidUsageError(f"{name}: {key!r} is not an option; choose one of {known}.")
