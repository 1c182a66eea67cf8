"""The choice of a kernel variant: by what the graph's last phase does and what the machine offers.

Called by the planner before anything is lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ark.errors import PlanError
from ark.ir.graph import Graph, Node
from ark.lower.fuse import fuse
from ark.lower.tiling import row_bytes
from ark.machine import Machine
from ark.variant import COMMUNICATE

HELD = 1024  # bytes that such a layer keeps beside its input


def choose(
    graph: Graph, machine: Machine, options: Mapping[str, Any], kept: frozenset[int]
) -> Machine:
    """The machine with the one variant that the plan will run under.

    The option `variant` names one; PlanError if the machine has none of that name. Otherwise it is
    the one with communicating warps where the last phase decodes on one rank: its products
    are linear layers of one row. All else runs under the machine's first. kept: as in fuse.
    """
    names = tuple(dict.fromkeys(v.name for v in machine.variants))
    wanted = options.get("variant")
    if wanted is not None and wanted not in names:
        raise PlanError(f"{machine.name} has no kernel variant {wanted!r}, but {', '.join(names)}")
    packets = machine.has("packets") and options.get("packets", True)
    streams = packets and options.get("fuse", True) and graph.world_size == 1
    for variant in machine.variants:
        target = dataclasses.replace(machine, variants=(variant,))
        if not variant.role(COMMUNICATE):
            if variant.name == wanted:
                return target
            continue
        made = fuse(graph, target, kept)
        last = [n for n in made.nodes if n.phase == len(made.phases) - 1]
        if _fits(last, target) and (variant.name == wanted or (streams and _decodes(last))):
            return target
    return machine.using(names[0])


def _decodes(nodes: list[Node]) -> bool:
    """Are the products of these nodes, of which there are some, linear layers of one row?"""
    layers = [n for n in nodes if n.type == "linear"]
    return (
        bool(layers)
        and all(n.inputs[0].shape[0] == 1 and n.inputs[1].shape[1] % 8 == 0 for n in layers)
        and all(n.inputs[1].dtype.name in ("fp32", "fp16", "bf16") for n in layers)
        and all(n.outputs[0].shape[0] == 1 for n in nodes if n.type == "attention")
        and not any(n.type == "matmul" for n in nodes)
    )


def _fits(nodes: list[Node], machine: Machine) -> bool:
    """Is there room beside the ring for the inputs of the linear layers of one row?"""
    rows = [n.inputs[1] for n in nodes if n.type == "linear" and n.inputs[0].shape[0] == 1]
    most = max((row_bytes(weight) for weight in rows), default=0)
    return most + HELD <= machine.shared_bytes - machine.ring_bytes
