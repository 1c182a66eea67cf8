"""Divides large graphs into parts, each of which becomes a kernel of its own.

On some machines, matrix products and convolutions are inlined into a kernel's loop, and the time to
compile the loop grows with the square of their number (`Dialect.joint_products`). The kernels of
several parts compile faster, and in parallel. A part ends at a place where the results that later
operators read have few bytes, because these results pass through torch's memory. Images that pass
from one part to another between convolutions have channels as the last dimension, because most
kernels of convolutions read and write images in this layout (ark.lower.rewrite.channels_last).
Called by compile.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from ark.backend.protocol import KernelBackend
from ark.interop.torch.graph import name_of, results_of
from ark.interop.torch.products import convolutions_as_tf32
from ark.machine.variant import LOAD
from ark.plan.types import BOX_ALIGNMENT_BYTES
from ark.runtime.session import backend, device

PRODUCTS = {
    f"{name}.default"
    for name in ("addmm", "baddbmm", "bmm", "convolution", "linear", "matmul", "mm")
}
CONVOLUTION = "convolution.default"
PERMUTE = torch.ops.aten.permute.default


def joint_products() -> int:
    """The most different products that one kernel should have; 0 if there is no limit."""
    used, opened = backend(), device()
    loads = any(v.role(LOAD) for v in opened.machine.variants)
    if not isinstance(used, KernelBackend) or not loads:
        return 0
    return used.dialect(opened.arch).joint_products


def part_starts(module: fx.GraphModule, most: int) -> list[int]:
    """Decides where a graph is divided into parts. Returns the index (in the list of all operators)
    of the first operator of each part except the first part. A part has at most `most` different
    products. The list is empty if the graph is not divided: if it has at most `most` products, or
    if an operator writes to its operands.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    if most < 1 or any(_writes(n) for n in calls):
        return []
    live = _live_bytes(calls)
    starts: list[int] = []
    begin = earliest = place = 0
    seen: set[Any] = set()
    while place < len(calls):
        seen |= _product(calls[place])
        if len(seen) > most:
            allowed = range(max(earliest, begin + 1), place + 1)
            best = min(allowed, key=lambda i: (live[i], -i))
            if live[best] == math.inf:
                return []
            starts.append(best)
            begin = earliest = place = best
            seen = set()
            continue
        place += 1
        if 4 * len(seen) <= 3 * most:  # shorter parts would be too many
            earliest = place
    return starts


def divided(module: fx.GraphModule, starts: Sequence[int]) -> fx.GraphModule:
    """Changes the module so that each part of it is a submodule that it calls, and returns it.
    starts: the result of part_starts.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function"]
    bounds = [0, *starts, len(calls)]
    parts = [calls[a:b] for a, b in itertools.pairwise(bounds)]
    parts = [[*_own_constants(module, part), *part] for part in parts]
    _pass_images(module, parts)
    for node in module.graph.find_nodes(op="get_attr"):
        if not node.users:
            module.graph.erase_node(node)
    return fuse_by_partitions(module, [dict.fromkeys(part) for part in parts])


def _own_constants(module: fx.GraphModule, part: Sequence[fx.Node]) -> list[fx.Node]:
    """Copies the constants that a part reads, so that the part has nodes of its own for them.
    Returns the new nodes.
    """
    copies: dict[fx.Node, fx.Node] = {}
    for node in part:
        for source in [n for n in node.all_input_nodes if n.op == "get_attr"]:
            if source not in copies:
                with module.graph.inserting_before(part[0]):
                    copies[source] = module.graph.node_copy(source)
            node.replace_input_with(source, copies[source])
    return list(copies.values())


def _pass_images(module: fx.GraphModule, parts: Sequence[list[fx.Node]]) -> None:
    """Changes the layout of images that pass between parts with convolutions. The part that
    computes an image transposes it, so that channels are the last dimension, and each part that
    reads the image transposes it back.
    """
    convolves = [any(name_of(n.target) == CONVOLUTION for n in part) for part in parts]
    places = {node: i for i, part in enumerate(parts) for node in part}
    for node, place in list(places.items()):
        readers: dict[int, list[fx.Node]] = {}
        for user in node.users:
            if convolves[place] and convolves[places.get(user, place)] and _is_image(node):
                readers.setdefault(places.get(user, place), []).append(user)
        readers.pop(place, None)
        if not readers:
            continue
        with module.graph.inserting_after(node):
            passed = module.graph.call_function(PERMUTE, (node, [0, 2, 3, 1]))
        value = node.meta["val"]
        passed.meta["val"] = value.permute(0, 2, 3, 1).contiguous()
        parts[place].insert(parts[place].index(node) + 1, passed)
        for reader, users in readers.items():
            with module.graph.inserting_before(parts[reader][0]):
                image = module.graph.call_function(PERMUTE, (passed, [0, 3, 1, 2]))
            image.meta["val"] = value
            parts[reader].insert(0, image)
            for user in users:
                user.replace_input_with(node, image)


def _is_image(node: fx.Node) -> bool:
    """True if the node is an image of several pixels, its convolutions are computed by matrix
    units, and the channels of a pixel take a multiple of 16 bytes.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() != 4 or not value.is_contiguous():
        return False
    units = value.dtype in (torch.bfloat16, torch.float16) or convolutions_as_tf32(value.dtype)
    aligned = value.shape[1] * value.element_size() % BOX_ALIGNMENT_BYTES == 0
    return units and aligned and math.prod(value.shape[2:]) > 1


def _product(node: fx.Node) -> set[Any]:
    """A key of the operator if it is a product: equal products have the same code."""
    name = name_of(node.target)
    if name not in PRODUCTS and "attention" not in name:
        return set()
    read = [v for n in node.all_input_nodes for v in results_of(n) if isinstance(v, torch.Tensor)]
    settings = [a for a in node.args if not isinstance(a, fx.Node)]
    return {(name, tuple((v.shape, v.dtype) for v in read), repr(settings))}


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _live_bytes(calls: Sequence[fx.Node]) -> list[float]:
    """For each index in the list of operators: the bytes of results of earlier operators that
    operators from this index on read. Infinite if one of these results is not a tensor.
    """
    places = {node: i for i, node in enumerate(calls)}
    begun: list[list[fx.Node]] = [[] for _ in range(len(calls) + 1)]
    ended: list[list[fx.Node]] = [[] for _ in range(len(calls) + 1)]
    for place, node in enumerate(calls):
        last = max((places.get(user, len(calls)) for user in node.users), default=place)
        if last > place:
            begun[place + 1].append(node)
            ended[min(last + 1, len(calls))].append(node)
    live: list[float] = []
    total, others = 0, 0
    for begins, ends in zip(begun[:-1], ended[:-1], strict=True):
        total += sum(map(_bytes, begins)) - sum(map(_bytes, ends))
        others += sum(not _bytes(n) for n in begins) - sum(not _bytes(n) for n in ends)
        live.append(math.inf if others else total)
    return live


def _bytes(node: fx.Node) -> int:
    """The bytes of a node's result; 0 if it is not a tensor."""
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0
