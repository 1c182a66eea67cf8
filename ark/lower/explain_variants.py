"""Prints, with ARK_DEBUG=lower, why kernel variants were chosen. For each phase it prints the
chosen variant with the rule that chose it, and for every other variant the predicted time or a node
that the variant does not support. Called by ark.lower.prepare.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ark.ir.graph import Graph
from ark.log import show
from ark.lower.choose import BY_TIME, ROUNDED, Choice, decoding, not_decoding
from ark.lower.rewrite.context import Context
from ark.lower.work_times import boxed, product_times, refusal
from ark.machine import Machine
from ark.machine.variant import COMMUNICATE, Variant


def show_variants(graph: Graph, context: Context, chosen: Sequence[Choice]) -> None:
    """Prints each phase's variant and, for every other variant, the reason against it."""
    for number, (name, choice) in enumerate(zip(graph.phases, chosen, strict=True)):
        for line in _lines(graph, context, number, choice):
            show("lower", f"phase {name}: {line}")


def _lines(graph: Graph, context: Context, phase: int, choice: Choice) -> list[str]:
    machine, name = context.machine, choice.machine.variant.name
    others = [other for other in dict.fromkeys(v.name for v in machine.variants) if other != name]
    if not others:
        return [f"variant {name}: the machine has no other"]
    why = choice.why
    if why == BY_TIME:
        mine, first = _sums(graph, machine)
        why += f": {mine:.4g} us, and {first:.4g} under {machine.variants[0].name}"
    reasons = [_reason(graph, context, phase, choice, machine.using(o).variant) for o in others]
    refused = (f"not {o}: {reason}" for o, reason in zip(others, reasons, strict=True))
    return [f"variant {name}: {why}", *refused]


def _reason(graph: Graph, context: Context, phase: int, choice: Choice, other: Variant) -> str:
    """The reason, as text, why the variant `other` was not chosen for a phase."""
    machine, name = context.machine, choice.machine.variant.name
    if context.options.get("variant") is not None:
        return f"the option `variant` names {name}"
    if other.role(COMMUNICATE):
        target = replace(machine, variants=(other,))
        candidate, nodes = decoding(graph, context, target, phase)
        refused = not_decoding(candidate, nodes, context, target)
        return refused or "the inputs of its linear layers do not fit beside the ring"
    if choice.machine.variant.role(COMMUNICATE):
        return _beside_decoding(graph, context, phase, choice, other)
    if boxed(other):
        alone = graph.with_nodes(n for n in graph.nodes if n.phase == phase)
        return refusal(alone, machine) or f"{name} has the phase for another reason: {choice.why}"
    if choice.why in (BY_TIME, ROUNDED):
        return f"predicted {_sums(graph, machine)[1]:.4g} us"
    return f"it serves every phase, and the rule prefers {name} whatever is predicted"


def _sums(graph: Graph, machine: Machine) -> tuple[float, float]:
    """The predicted microseconds of products and attention under the variant for warpgroups, and
    under the machine's first variant.
    """
    pairs = product_times([n for n in graph.nodes if not n.virtual], machine)
    return sum(t for _, t, _ in pairs), sum(t for _, _, t in pairs)


def _beside_decoding(
    graph: Graph, context: Context, phase: int, choice: Choice, other: Variant
) -> str:
    """The reason why a decoding phase, whose variant has communicating warps, does not use the
    variant `other`.
    """
    machine, name = context.machine, choice.machine.variant.name
    nodes = decoding(graph, context, choice.machine, phase)[1]
    layers = [n for n in nodes if n.type == "linear"]
    if boxed(other) and layers:
        return f"{layers[0].name} is a linear layer of few rows, whose weights it does not stream"
    streamed = sum(n.inputs[1].nbytes for n in layers)
    us = streamed / (machine.bandwidth_gbps * 1e3)
    return (
        f"it streams the same {streamed:,} bytes of weights, predicted {us:.4g} us under either; "
        f"{name} saves the barrier of a block behind each task, which the cost model does not count"
    )
