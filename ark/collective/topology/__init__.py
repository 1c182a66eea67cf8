"""The networks for which collectives are planned: their type, their JSON form, builders, names and
detection.
"""

from ark.collective.topology.boxes import BOXES, Box, nvlink_boxes, topology_of_boxes
from ark.collective.topology.costs import TYPICAL, CostModel, Protocol
from ark.collective.topology.json_form import from_json, to_json
from ark.collective.topology.model import Link, Topology, TopologyError
from ark.collective.topology.names import GRAMMAR, load, named
from ark.collective.topology.shapes import full_mesh, hypercube, mesh, ring, star, torus

__all__ = [
    "BOXES",
    "GRAMMAR",
    "TYPICAL",
    "Box",
    "CostModel",
    "Link",
    "Protocol",
    "Topology",
    "TopologyError",
    "from_json",
    "full_mesh",
    "hypercube",
    "load",
    "mesh",
    "named",
    "nvlink_boxes",
    "ring",
    "star",
    "to_json",
    "topology_of_boxes",
    "torus",
]
