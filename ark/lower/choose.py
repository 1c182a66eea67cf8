"""The choice of a kernel variant: by what the graph's last phase does and what the machine offers.

Called by the planner before anything is lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ark.errors import PlanError
from ark.ir.attributes import AttentionAttributes, LinearAttributes
from ark.ir.dtype import RowType
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_linear import fuse_linear
from ark.lower.rewrite.narrow_inputs import narrow_inputs
from ark.lower.tiling import input_in_memory, row_bytes, split_k, stage_rows, stage_tile
from ark.lower.work_times import boxed, work_us
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE, MOVE
from ark.tasks.linear_form import (
    MOST_NARROW,
    narrow_bytes,
    narrow_rows,
    row_input_bytes,
    sums_bytes,
)

MAX_ROW_SUM_BYTES = 1024  # bytes that one row's sums take, or what else several need


def choose(graph: Graph, context: Context) -> tuple[Machine, ...]:
    """By phase, the machine with the one variant that it will run under.

    All phases have one variant, but those that read prompts before others: in one with a loader
    for warpgroups where the machine has that; and those that decode sequences in pages: in that of
    their own number of rows, because a launch runs one of them.
    """
    machine, options = context.machine, context.options
    chosen = _choose(graph, context)
    machines = [chosen] * len(graph.phases)
    if options.get("variant") is None and options.get("fuse", True):
        for phase in range(len(machines) - 1):
            nodes = [n for n in graph.nodes if n.phase == phase and not n.virtual]
            variant = next((v for v in machine.variants if boxed(v)), None)
            if variant is not None and _reads_prompts(nodes, machine):
                machines[phase] = dataclasses.replace(machine, variants=(variant,))
            elif any(n.type == "paged_attention" for n in nodes):
                alone = graph.with_nodes(n for n in graph.nodes if n.phase == phase)
                machines[phase] = _choose(alone, context, phase)
    return tuple(machines)


def with_movers(machine: Machine, offered: Machine) -> Machine:
    """The machine with a variant of the same name some of whose warps move, if that is offered."""
    for variant in offered.variants:
        if variant.name == machine.variant.name and variant.role(MOVE):
            return dataclasses.replace(machine, variants=(variant,))
    return machine


def _is_prompt(graph: Graph, machine: Machine) -> bool:
    """True where the graph has one phase, which reads sequences."""
    nodes = [n for n in graph.nodes if not n.virtual]
    return len(graph.phases) == 1 and _reads_prompts(nodes, machine)


def _reads_prompts(nodes: list[Node], machine: Machine) -> bool:
    """True where box copies can load the products, all of many rows with 16-bit weights. One of a
    single row, a head's, may be among them.
    """
    products = [n for n in nodes if n.type == "matmul" and n.inputs[0].shape[0] != 1]
    return (
        bool(products)
        and not any(n.hints or n.type == "expert_linear" for n in nodes)
        and all(
            n.inputs[0].shape[0] >= machine.large_product[0]
            and n.outputs[0].shape[-1] >= machine.large_product[1]
            and len(n.inputs[1].shape) == 2
            and n.inputs[1].dtype.name in ("bf16", "fp16")
            and n.inputs[1].shape[-1] % 8 == 0
            and n.inputs[1].dense
            for n in products
        )
    )


def _choose(graph: Graph, context: Context, phase: int = -1) -> Machine:
    """The machine with the variant of a phase, by default the last one.

    The option `variant` names one; PlanError if the machine has none of that name. Otherwise it is
    the one with communicating warps where the phase decodes: its products are linear layers of
    one row; the one that loads for warpgroups where that is predicted to take less time (refusal),
    or where the only phase reads prompts.
    All else runs under the machine's first.
    """
    machine, options = context.machine, context.options
    names = tuple(dict.fromkeys(v.name for v in machine.variants))
    wanted = options.get("variant")
    if wanted is not None and wanted not in names:
        raise PlanError(f"{machine.name} has no kernel variant {wanted!r}, but {', '.join(names)}")
    if wanted is None and any(n.hints and n.hints.cuts for n in graph.nodes):
        return machine.using(names[0])  # whose bodies take tiles of any size
    packets = machine.has(Capability.PACKETS) and options.get("packets", True)
    streams = packets and options.get("fuse", True)
    leading: list[tuple[float, Machine]] = []
    for variant in machine.variants:
        target = dataclasses.replace(machine, variants=(variant,))
        if not variant.role(COMMUNICATE):
            if leading:
                break
            if variant.name == wanted or (
                wanted is None
                and boxed(variant)
                and (
                    not refusal(graph, machine)
                    or (options.get("fuse", True) and _is_prompt(graph, machine))
                )
            ):
                return target
            continue
        under = dataclasses.replace(context, machine=target)
        candidate = narrow_inputs(fuse_linear(graph, under), under)
        last = [n for n in candidate.nodes if n.phase == range(len(candidate.phases))[phase]]
        decodes = streams and _decodes(last, target) and _settled(candidate.nodes)
        fits = _fits(candidate.nodes, target) and not _starves(last, target, machine)
        if fits and (variant.name == wanted or decodes):
            full = filled(last, target)
            if full is None:
                return target
            leading.append((full, target))
    return max(leading, key=lambda one: one[0])[1] if leading else machine.using(names[0])


def filled(nodes: Sequence[Node], machine: Machine) -> float | None:
    """The part of the ring that stages of quantised layers fill, each by its bytes; None if there
    are no such layers.
    """
    weights = [n.inputs[1] for n in nodes if n.type == "linear"]
    sizes = [(w.nbytes, w) for w in weights if isinstance(w.dtype, RowType)]
    if not sizes:
        return None
    held = sum(size * stage_rows(w, machine, False) * row_bytes(w) for size, w in sizes)
    return held / (sum(size for size, _ in sizes) * machine.stage_bytes)


def refusal(graph: Graph, machine: Machine) -> str:
    """Why the variant for warpgroups does not serve the graph, and through which node; empty where
    it does, or where the machine has none.

    It serves where its products and attention are predicted to take less time than under the
    machine's first variant, those that box copies cannot load included.
    """
    target = next((machine.using(v.name) for v in machine.variants if boxed(v)), None)
    if target is None:
        return ""
    nodes = [n for n in graph.nodes if not n.virtual]
    linear = next((n.name for n in nodes if n.type == "linear"), None)
    if linear is not None:
        return f"{linear} is a linear layer of few rows"
    work = [n for n in nodes if n.type in ("matmul", "attention")]
    if not work:
        return "no product and no attention"
    first = machine.using(machine.variants[0].name)
    share = target.warps / first.warps
    pairs = [(work_us(n, target, share), work_us(n, first), n) for n in work]
    mine, other = sum(t for t, _, _ in pairs), sum(t for _, t, _ in pairs)
    if mine < other:
        return ""
    slowest_us, instead, worst = max(pairs, key=lambda times: times[0] - times[1])
    sides = " x ".join(f"{t.dtype.name}{list(t.shape)}" for t in worst.inputs[:2])
    return (
        f"products and attention are predicted to take {mine:.1f} us, and {other:.1f} under "
        f"{first.variant.name}; above all {worst.name}, {slowest_us:.1f} and {instead:.1f} us: "
        f"{sides}"
    )


def _decodes(nodes: list[Node], machine: Machine) -> bool:
    """True where there are products and all are linear layers of one row, or of one row for each
    of few sequences.
    """
    layers = [n for n in nodes if n.type == "linear"]
    rows = layers[0].inputs[0].shape[0] if layers else 0

    def fits(weight: Tensor) -> bool:
        return narrow_rows(rows, weight, split_k(rows, weight, machine) or 1)

    return (
        bool(layers)
        and all(n.inputs[0].shape[0] == rows and n.inputs[1].shape[1] % 8 == 0 for n in layers)
        and all(fits(n.inputs[1]) for n in layers)
        and all(_one_each(n, rows) for n in nodes if n.type == "attention")
        and not any(n.type == "matmul" or _apart(n) for n in nodes)
    )


def _apart(node: Node) -> bool:
    """True for a product with quantised rows that do not come through the ring."""
    return node.type == "quantized_linear" and isinstance(node.inputs[1].dtype, RowType)


def _one_each(node: Node, rows: int) -> bool:
    """True for attention of `rows` sequences with one row each."""
    sequences = node.inputs[3].shape[0] if node.read(AttentionAttributes).placed else 1
    return node.outputs[0].shape[0] == rows == sequences


def _settled(nodes: Sequence[Node]) -> bool:
    """True where bodies read before their waits only memory of earlier iterations. Residual and
    caches a kind reads so only where they are.
    """
    written: set[tuple[int, int]] = set()  # (phase, buffer)
    for node in nodes:
        early: Sequence[Tensor] = ()
        if node.type == "linear":
            early = node.inputs[2 : -1 if node.read(LinearAttributes).epilogue == "add" else None]
        elif node.type == "attention":
            early = node.inputs[3:4]
        if any((node.phase, t.buffer.id) in written for t in early):
            return False
        if not node.virtual:
            written |= {(node.phase, t.buffer.id) for t in node.outputs}
    return True


def _starves(nodes: list[Node], target: Machine, machine: Machine) -> bool:
    """True where a layer of one row reads its operand stream with a smaller ring than the first
    variant's. With several rows only, whose products cost more: where more copies are in flight
    than there, so that larger exchanges queue, or warps lack registers for many rows.
    """
    first = machine.variants[0]
    rows = max((n.inputs[0].shape[0] for n in nodes if n.type == "linear"), default=0)
    if target.variant.most_rows and rows > target.variant.most_rows:
        return True
    if any(n.type == "linear" and n.inputs[0].shape[0] == 1 for n in nodes):
        fewer = target.variant.stages < first.stages
        return (fewer or target.ring_bytes < first.ring_bytes) and filled(nodes, target) is None
    return target.variant.in_flight > first.in_flight


def _fits(nodes: list[Node], machine: Machine) -> bool:
    """True where shared memory beside the ring holds the inputs of linear layers of few rows."""
    layers = [n for n in nodes if n.type == "linear" and n.inputs[0].shape[0] <= MOST_NARROW]
    held = (_held(n, machine) for n in layers)
    return MAX_ROW_SUM_BYTES + max(held, default=0) <= machine.shared_bytes - machine.ring_bytes


def _held(node: Node, machine: Machine) -> int:
    """Bytes of shared memory that a linear layer of few rows takes, but what one row's sums do."""
    (rows, k), dtype = node.inputs[0].shape, node.inputs[1].dtype
    if isinstance(dtype, RowType):
        return row_input_bytes(dtype)  # of one row
    if rows == 1:
        return narrow_bytes(1, k, dtype.itemsize)
    held, splits = stage_tile(node, machine)
    input_bytes = 0 if input_in_memory(node) else narrow_bytes(rows, k, dtype.itemsize)
    return input_bytes + sums_bytes(machine.warps, rows, held, splits)
