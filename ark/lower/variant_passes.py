"""Passes on the whole graph that depend on the kernel variants that would be chosen for their
result. Listed in ark.lower.passes.
"""

from __future__ import annotations

from ark.ir.graph import Graph
from ark.lower.choose import choose
from ark.lower.rewrite.attention_recognised import multiplies
from ark.lower.rewrite.channels_last import channels_last as turn_channels
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_attention import fuse_attention
from ark.machine.capability import Capability


def channels_last(graph: Graph, context: Context) -> Graph:
    """The graph with the channels of convolutions last. Depthwise convolutions and images with few
    channels are included only if the kernel variant of that graph loads windows by box copies.
    """
    if not context.machine.has(Capability.WINDOW_BOXES):
        return turn_channels(graph, context, boxed=False)
    turned = turn_channels(graph, context)
    if turned is graph or all(m.variant.name == "matrix" for m in choose(turned, context)):
        return turned
    return turn_channels(graph, context, boxed=False)


def fuse_unit_attention(graph: Graph, context: Context) -> Graph:
    """The graph with each attention, and its gradients, fused into one node each, if the kernel
    variants chosen for the resulting graph all run them on matrix units or with one thread per
    processor. Otherwise the gradients, or attention too, are left as they are.
    """
    for gradients in (True, False):
        fused = fuse_attention(graph, context, gradients)
        if fused is graph:
            continue
        machines = choose(fused, context)
        if all(multiplies(n, machines[n.phase]) for n in fused.nodes):
            return fused
    return graph
