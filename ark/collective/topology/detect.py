"""Builds the topology of this machine from its own devices. Users select it by the name `detect`.
Each backend package (entry-point group "ark.backends") may have a module `links` with a function
`read_links() -> MachineLinks`, which raises `ark.errors.SystemError` with the reason if it finds no
device. Only the backends call vendors' interfaces.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import entry_points

from ark.collective.topology.boxes import DIRECT_LATENCY_US, SWITCH_HOP_LATENCY_US
from ark.collective.topology.model import Link, Topology, TopologyError
from ark.collective.topology.shapes import duplex
from ark.errors import SystemError

GROUP = "ark.backends"


@dataclass(frozen=True)
class MachineLinks:
    """The links between a machine's devices, as a backend reads them. Bandwidths are in GB/s each
    way.

    `direct` lists (device, device, bandwidth) once for each pair of devices that are wired to each
    other. `switched` lists (device, bandwidth) for each device on the switch of the box. `host`
    lists (device, bandwidth) for the host's bus, which is used only if the other links do not
    connect all devices.
    """

    name: str
    devices: int
    direct: tuple[tuple[int, int, Fraction], ...] = ()
    switched: tuple[tuple[int, Fraction], ...] = ()
    host: tuple[tuple[int, Fraction], ...] = ()


def detect(readers: Iterable[Callable[[], MachineLinks]] | None = None) -> Topology:
    """Returns the topology from the first reader that finds devices. By default the readers are the
    backends'.

    Raises SystemError with the reasons of all readers if none finds a device.
    """
    reasons = []
    for reader in _backend_readers() if readers is None else readers:
        try:
            machine = reader()
        except SystemError as error:
            reasons.append(str(error))
            continue
        topology = from_links(machine)
        topology.validate()
        return topology
    why = " ".join(reasons) or "No installed backend can read a machine's links."
    raise SystemError(
        f"The topology of this machine cannot be detected. {why} Name one instead, such as h100, "
        "or write it as JSON."
    )


def from_links(machine: MachineLinks) -> Topology:
    """Returns the topology of a machine. Its nodes are the devices "g<i>", the box's switch "s0"
    and the host's bus "host".
    """
    ranks = tuple(f"g{device}" for device in range(machine.devices))
    links: list[Link] = []
    for a, b, bandwidth in machine.direct:
        links += duplex(ranks[a], ranks[b], bandwidth, DIRECT_LATENCY_US)
    for device, bandwidth in machine.switched:
        links += duplex(ranks[device], "s0", bandwidth, SWITCH_HOP_LATENCY_US)
    switches = ("s0",) if machine.switched else ()
    topology = Topology(machine.name, ranks, switches, tuple(links))
    try:
        topology.validate()
        return topology
    except TopologyError:
        for device, bandwidth in machine.host:
            links += duplex(ranks[device], "host", bandwidth, SWITCH_HOP_LATENCY_US)
        return Topology(machine.name, ranks, (*switches, "host"), tuple(links))


def _backend_readers() -> list[Callable[[], MachineLinks]]:
    readers = []
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        try:
            importlib.import_module(point.module)
            if importlib.util.find_spec(f"{point.module}.links") is not None:
                readers.append(importlib.import_module(f"{point.module}.links").read_links)
        except ImportError as error:
            readers.append(_unavailable(f"The backend {point.name} cannot be loaded ({error})."))
    return readers


def _unavailable(reason: str) -> Callable[[], MachineLinks]:
    def read_links() -> MachineLinks:
        raise SystemError(reason)

    return read_links
