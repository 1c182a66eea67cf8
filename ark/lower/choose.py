"""Chooses the kernel variant of each phase, which is the way in which a kernel divides work among
its warps, from the ops of the graph and the capabilities of the machine. Called by
ark.lower.prepare before any op is lowered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ark.errors import PlanError
from ark.ir.attributes import AttentionAttributes, LinearAttributes
from ark.ir.dtype import RowType, bf16, fp16, value_type
from ark.ir.graph import Graph, Node
from ark.ir.values import Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_linear import fuse_linear
from ark.lower.rewrite.narrow_inputs import narrow_inputs
from ark.lower.tiling import divided_bytes
from ark.lower.work_times import boxed, product_times, refusal
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.machine.variant import COMMUNICATE, MOVE
from ark.tasks.linear_form import (
    MAX_UNIT_INPUT_ROWS,
    input_in_memory,
    narrow_bytes,
    narrow_rows,
    row_input_bytes,
    row_nbytes,
    split_k,
    stage_rows,
    stage_tile,
    sums_bytes,
)

BY_TIME = "its products and attention are predicted to take less time"
ROUNDED = "its products are predicted to take less time with inputs rounded to the weights' type"
MAX_ROW_SUM_BYTES = 1024  # shared memory for the sums of a layer of one row; reserved in any case
MAX_EXPERT_SHARE = 0.25  # most bytes of experts' weights, relative to those of products


@dataclass(frozen=True)
class Choice:
    """The kernel variant that was chosen for a phase. machine: the machine with only this variant.
    why: the rule that chose it, as text for people.
    """

    machine: Machine
    why: str


def choose(graph: Graph, context: Context) -> tuple[Machine, ...]:
    """The machine that each phase is planned for: the given machine with only the kernel variant
    that was chosen for the phase.
    """
    return tuple(choice.machine for choice in choices(graph, context))


def choices(graph: Graph, context: Context) -> list[Choice]:
    """Returns the kernel variant of each phase. A phase is an entry point of the model, for example
    the decoding of tokens or the reading of a prompt.

    By default, all phases have the variant that is chosen for the last phase. There are two
    exceptions. Earlier phases that read prompts get a variant in which one warp loads operands for
    warpgroups, if the machine has such a variant. Phases that decode sequences with paged attention
    get the variant that suits their own number of rows, because a launch runs only one of these
    phases.
    """
    machine, options = context.machine, context.options
    last = _choose(graph, context)
    asked = options.get("variant") is not None
    why = last.why if asked else f"as phase {graph.phases[-1]}, with which it shares a kernel"
    shared = Choice(last.machine, why)
    chosen = [shared] * (len(graph.phases) - 1) + [last]
    if options.get("variant") is None and options.get("fuse", True):
        for phase in range(len(chosen) - 1):
            nodes = [n for n in graph.nodes if n.phase == phase and not n.virtual]
            variant = next((v for v in machine.variants if boxed(v)), None)
            if variant is not None and _reads_prompts(nodes, machine):
                target = dataclasses.replace(machine, variants=(variant,))
                chosen[phase] = Choice(target, _prompt_text(machine))
            elif any(n.type == "paged_attention" for n in nodes):
                alone = graph.with_nodes(n for n in graph.nodes if n.phase == phase)
                chosen[phase] = _choose(alone, context, phase)
    return chosen


def with_movers(machine: Machine, offered: Machine) -> Machine:
    """The machine with a variant that also has moving warps, which only copy and add data between
    ranks. It is the variant of `offered` with the same name as the machine's variant. If `offered`
    has none, the machine is returned unchanged.
    """
    for variant in offered.variants:
        if variant.name == machine.variant.name and variant.role(MOVE):
            return dataclasses.replace(machine, variants=(variant,))
    return machine


def _prompt_text(machine: Machine) -> str:
    rows, columns = machine.large_product
    return (
        f"it reads prompts: its products have at least {rows} rows and {columns} columns, and "
        "weights of 16 bits"
    )


def _faster_rounded(graph: Graph, context: Context, target: Machine) -> bool:
    """True if a phase that decodes many rows is faster under the variant for warpgroups.

    This variant rounds the inputs of products to 16 bits. The result is True only if the phase has
    attention over a cache, and all products have the same number of rows, which is more than linear
    layers support. Their weights must have 16 bits or be quantised. The products must be predicted
    to take less time than under the machine's first variant. Layers of experts must read few bytes
    in comparison with these products, because warpgroups do not compute them.
    """
    nodes = [n for n in graph.nodes if not n.virtual]
    if not any(n.type in ("attention", "paged_attention") for n in nodes):
        return False
    products = [n for n in nodes if n.type in ("matmul", "linear", "quantized_linear")]
    rows = {n.inputs[0].shape[0] for n in products}
    if len(rows) != 1 or min(rows) <= MAX_UNIT_INPUT_ROWS or not _of_weights(nodes, products):
        return False
    read = sum(n.inputs[1].nbytes for n in products)
    if _expert_bytes(nodes) > MAX_EXPERT_SHARE * read:
        return False
    rounded = narrow_inputs(graph, dataclasses.replace(context, machine=target))
    pairs = product_times([n for n in rounded.nodes if not n.virtual], context.machine)
    first = product_times(nodes, context.machine)
    return sum(t for _, t, _ in pairs) < sum(t for _, _, t in first)


def _expert_bytes(nodes: Sequence[Node]) -> int:
    """The largest number of bytes of weights that layers of experts can read in an iteration, if
    each row chooses different experts. Weights that all rows share are counted once.
    """
    layers = [n for n in nodes if n.type == "expert_linear"]
    chosen = (n.outputs[0].elements * n.inputs[1].shape[-1] for n in layers)
    return sum(
        min(n.inputs[1].nbytes, n.inputs[1].dtype.nbytes(elements))
        for n, elements in zip(layers, chosen, strict=True)
    )


def _reads_prompts(nodes: list[Node], machine: Machine) -> bool:
    """True if all products have many rows and 16-bit weights that box copies can load, as in a
    phase that reads a prompt. Products of a single row, such as the last layer of a language model,
    are ignored.
    """
    products = [n for n in nodes if n.type == "matmul" and n.inputs[0].shape[0] != 1]
    rows, columns = machine.large_product
    experts = any(n.type == "expert_linear" for n in nodes)
    return (
        not experts
        and _of_weights(nodes, products)
        and all(
            n.inputs[0].shape[0] >= rows and n.outputs[0].shape[-1] >= columns for n in products
        )
    )


def _of_weights(nodes: Sequence[Node], products: Sequence[Node]) -> bool:
    """True if the phase has products, and all of them have 16-bit weights that box copies can
    load.
    """
    return (
        bool(products)
        and not any(n.hints for n in nodes)
        and all(
            len(n.inputs[1].shape) == 2
            and value_type(n.inputs[1].dtype) in (bf16, fp16)
            and n.inputs[1].shape[-1] % 8 == 0
            and n.inputs[1].dense
            for n in products
        )
    )


def _choose(graph: Graph, context: Context, phase: int = -1) -> Choice:
    """Chooses the kernel variant of one phase. If the user selects a variant by the option
    `variant`, that variant is used; PlanError is raised if the machine does not have it. Otherwise
    there are three rules. A phase that decodes (its products are linear layers of one row, or of
    one row per sequence) has the variant with communicating warps. A phase has the variant for
    warpgroups if it is predicted to take less time with it (see refusal and, for a phase that
    decodes many rows, _faster_rounded), or if it reads prompts. Any other phase has the machine's
    first variant.
    """
    machine, options = context.machine, context.options
    names = tuple(dict.fromkeys(v.name for v in machine.variants))
    wanted = options.get("variant")
    if wanted is not None and wanted not in names:
        raise PlanError(
            f"{machine.name} has no kernel variant {wanted!r}; it has {', '.join(names)}"
        )
    first = machine.using(names[0])
    hinted = next((n.name for n in graph.nodes if n.hints and n.hints.cuts), None)
    if wanted is None and hinted is not None:  # the first variant's bodies take tiles of any size
        return Choice(first, f"{hinted} has a hint for its tile, which this variant supports")
    asked = "the option `variant` names it"
    leading: list[tuple[float, Choice]] = []
    for variant in machine.variants:
        target = dataclasses.replace(machine, variants=(variant,))
        if not variant.role(COMMUNICATE):
            if leading:
                break
            if variant.name == wanted:
                return Choice(target, asked)
            if wanted is None and boxed(variant):
                if not refusal(graph, machine):
                    return Choice(target, BY_TIME)
                if options.get("fuse", True):
                    number = range(len(graph.phases))[phase]
                    alone = graph.with_nodes(n for n in graph.nodes if n.phase == number)
                    if _reads_prompts([n for n in alone.nodes if not n.virtual], machine):
                        return Choice(target, _prompt_text(machine))
                    if _faster_rounded(alone, context, target):
                        return Choice(target, ROUNDED)
            continue
        candidate, last = decoding(graph, context, target, phase)
        refused = not_decoding(candidate, last, context, target)
        fits = _fits(candidate.nodes, target, first)
        fits = fits and not _starves(last, target, machine)
        if fits and (variant.name == wanted or not refused):
            choice = Choice(target, asked if variant.name == wanted else _decoding_text(last))
            full = filled(last, target)
            if full is None:
                return choice
            leading.append((full, choice))
    if leading:
        return max(leading, key=lambda one: one[0])[1]
    return Choice(first, asked if wanted == names[0] else "no other variant serves it")


def decoding(
    graph: Graph, context: Context, target: Machine, phase: int
) -> tuple[Graph, list[Node]]:
    """Runs the rewrites for `target`, a machine whose variant has communicating warps. Returns the
    new graph and the nodes of phase number `phase` in it, by which the caller decides whether the
    phase can run under that variant.
    """
    under = dataclasses.replace(context, machine=target)
    candidate = narrow_inputs(fuse_linear(graph, under), under)
    number = range(len(candidate.phases))[phase]
    return candidate, [n for n in candidate.nodes if n.phase == number]


def _decoding_text(nodes: Sequence[Node]) -> str:
    layers = [n for n in nodes if n.type == "linear"]
    rows = layers[0].inputs[0].shape[0]
    return (
        f"it decodes: its {len(layers)} products are linear layers of "
        f"{'one row' if rows == 1 else f'{rows} rows, one for each sequence'}"
    )


def filled(nodes: Sequence[Node], machine: Machine) -> float | None:
    """Weights are streamed through slots (stages) of a ring in shared memory, and a stage has whole
    rows. Returns the fraction of a stage that rows of quantised weights fill, averaged over all
    quantised layers, weighted by their bytes. None if no layer is quantised.
    """
    weights = [n.inputs[1] for n in nodes if n.type == "linear"]
    sizes = [(w.nbytes, w) for w in weights if isinstance(w.dtype, RowType)]
    if not sizes:
        return None
    held = sum(size * stage_rows(w, machine, False) * row_nbytes(w) for size, w in sizes)
    return held / (sum(size for size, _ in sizes) * machine.stage_bytes)


def not_decoding(graph: Graph, nodes: list[Node], context: Context, machine: Machine) -> str:
    """The reason, which names one of the nodes, why a phase cannot run under a variant with
    communicating warps; "" if it can. This requires that all products of the phase are linear
    layers of one row, or of one row for each of a few sequences.
    """
    if not context.machine.has(Capability.PACKETS) or not context.options.get("packets", True):
        return "activations do not travel as packets"
    if not context.options.get("fuse", True):
        return "ops are not joined"
    layers = [n for n in nodes if n.type == "linear"]
    for node in nodes:
        if node.type == "matmul" or _apart(node):
            return f"{node.name} is a product of {node.outputs[0].shape[-2]} rows"
    if not layers:
        return "it has no linear layers of few rows"
    rows = layers[0].inputs[0].shape[0]
    for node in layers:
        weight = node.inputs[1]
        if node.inputs[0].shape[0] != rows:
            return f"{node.name} has {node.inputs[0].shape[0]} rows, and {layers[0].name} {rows}"
        if weight.shape[1] % 8 or not narrow_rows(
            rows, weight, split_k(rows, weight, machine) or 1
        ):
            return f"{node.name} has {rows} rows of {weight.shape[1]} elements"
    for node in nodes:
        if node.type == "attention" and not _one_each(node, rows):
            return f"{node.name} is attention of several rows of a sequence"
    return "" if _settled(graph.nodes) else "an op reads early what this iteration writes"


def _apart(node: Node) -> bool:
    """True for a product whose quantised weights are read directly from memory instead of through
    the ring in shared memory.
    """
    return node.type == "quantized_linear" and isinstance(node.inputs[1].dtype, RowType)


def _one_each(node: Node, rows: int) -> bool:
    """True for attention of `rows` sequences with one row each."""
    sequences = node.inputs[3].shape[0] if node.read(AttentionAttributes).placed else 1
    return node.outputs[0].shape[0] == rows == sequences


def _settled(nodes: Sequence[Node]) -> bool:
    """True if tasks of linear layers and attention may read small operands before they wait for
    earlier tasks. This requires that no earlier node of the same iteration writes these operands.
    In a linear layer, they are all inputs after the input and the weight, except a residual. In
    attention, it is the input at index 3, the position.
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
    """True if the variant of `target` would slow linear layers down, in one of two cases. Layers of
    one row with unquantised weights are slower if the ring (the shared memory through which weights
    are streamed) is smaller than in the machine's first variant. Layers of several rows are slower
    if a thread has too few registers, or if more copies are in flight than in the first variant,
    because data between processors queue behind these copies.
    """
    first = machine.variants[0]
    rows = max((n.inputs[0].shape[0] for n in nodes if n.type == "linear"), default=0)
    if target.variant.most_rows and rows > target.variant.most_rows:
        return True
    if any(n.type == "linear" and n.inputs[0].shape[0] == 1 for n in nodes):
        fewer = target.variant.stages < first.stages
        return (fewer or target.ring_bytes < first.ring_bytes) and filled(nodes, target) is None
    return target.variant.in_flight > first.in_flight


def _fits(nodes: Sequence[Node], machine: Machine, otherwise: Machine) -> bool:
    """True if the shared memory that the ring leaves free is large enough for the inputs and sums
    of every linear layer of few rows, and for attention whose positions are divided among tasks.
    otherwise: the machine with the kernel variant that is used if no variant has enough; attention
    that has not enough there either is not divided, and needs no such memory.
    """
    layers = [
        n for n in nodes if n.type == "linear" and n.inputs[0].shape[0] <= MAX_UNIT_INPUT_ROWS
    ]
    held = [_held(n, machine) + MAX_ROW_SUM_BYTES for n in layers]
    attended = [divided_bytes(n) for n in nodes if n.type in ("attention", "paged_attention")]
    held += [size for size in attended if size <= otherwise.task_bytes]
    return max(held, default=0) <= machine.task_bytes


def _held(node: Node, machine: Machine) -> int:
    """Bytes of shared memory that a linear layer of few rows needs for its inputs and, if it has
    several rows, for their sums. The sums of a single row are not counted here, because
    MAX_ROW_SUM_BYTES is reserved for them.
    """
    (rows, k), dtype = node.inputs[0].shape, node.inputs[1].dtype
    if isinstance(dtype, RowType):
        return row_input_bytes(dtype)  # bytes of one row
    if rows == 1:
        return narrow_bytes(1, k, dtype.itemsize)
    held, splits = stage_tile(node, machine)
    input_bytes = 0 if input_in_memory(node) else narrow_bytes(rows, k, dtype.itemsize)
    return input_bytes + sums_bytes(machine.warps, rows, held, splits)
