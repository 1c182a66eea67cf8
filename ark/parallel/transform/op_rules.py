"""The rules by which ops may be split: for each op a function that returns a node's annotation.

ark.parallel.transform.annotations describes the notation. Ops that cannot be split are in WHOLE,
with the reason. The rules are like those of nnScaler (Lin et al., OSDI 2024).
tests/unit/parallel/transform/test_op_rules.py requires an entry for every op.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence

from ark.ir.attributes import (
    AlongAttributes,
    AttentionAttributes,
    GroupAttributes,
    MatmulAttributes,
    ReduceAttributes,
    RotaryAttributes,
    TransposeAttributes,
)
from ark.ir.graph import Node
from ark.ir.values import Tensor
from ark.parallel.transform.carried import EXPERT
from ark.parallel.transform.rearranged import remap

LETTERS = string.ascii_lowercase


def _names(tensor: Tensor) -> str:
    """A letter for each dimension of a tensor."""
    return LETTERS[: len(tensor.shape)]


def elementwise_rule(node: Node) -> str:
    """The annotation of an elementwise op. Dimensions of the operands are matched from the last one
    on, as in NumPy's broadcasting.
    """
    out = node.outputs[0].shape
    names = _names(node.outputs[0])

    def letters(shape: tuple[int, ...]) -> str:
        own = zip(names[len(out) - len(shape) :], shape, out[len(out) - len(shape) :], strict=True)
        return " ".join("1" if n == 1 != m else name for name, n, m in own)

    return f"{', '.join(letters(t.shape) for t in node.inputs)} -> {' '.join(names)}"


def _matmul(node: Node) -> str:
    out = node.outputs[0].shape
    batch = LETTERS[: len(out) - 2]

    def letters(shape: tuple[int, ...], last: str) -> str:
        lead = batch[len(batch) - len(shape) + 2 :]
        sizes = zip(lead, shape, out[len(batch) - len(lead) :], strict=False)
        return " ".join([*("1" if n == 1 != m else name for name, n, m in sizes), last])

    transpose_a, transpose_b = node.read(MatmulAttributes).transposes
    a = letters(node.inputs[0].shape, "z+ x" if transpose_a else "x z+")
    b = letters(node.inputs[1].shape, "y z+" if transpose_b else "z+ y")
    return f"{a}, {b} -> {' '.join([*batch, 'x', 'y'])}"


def _quantized_linear(node: Node) -> str:
    """The annotation of a linear layer with quantised weights. Scales and zero points have one
    element for each group of elements in a row of the weight.
    """
    group = node.read(GroupAttributes).group
    scales = ", y z+" * (len(node.inputs) - 2)
    return f"x z+/{group}, y z+/{group}{scales} -> x y"


def _rows(node: Node) -> str:
    """The annotation of norms and softmax. Rows are not cut, because each result needs its whole
    row.
    """
    names = _names(node.outputs[0])
    row = " ".join([*names[:-1], names[-1] + "^"])
    scales = "".join(f", {names[-1]}^" for _ in node.inputs[1:])
    return f"{row}{scales} -> {row}"


def _pairs(node: Node) -> str:
    """The annotation of ops on pairs of neighbours along the last dimension. Pairs stay together.
    Otherwise the op is cut like an elementwise op.
    """
    return ", ".join(f"{part}/2" for part in elementwise_rule(node).split(" ->")[0].split(", ")) + (
        f" -> {' '.join(_names(node.outputs[0]))}/2"
    )


def _reduced(node: Node, axis: int, mark: str, keepdims: bool) -> str:
    names = _names(node.inputs[0])
    left = " ".join(n + (mark if d == axis else "") for d, n in enumerate(names))
    kept = ["1" if d == axis else n for d, n in enumerate(names)]
    if not keepdims:
        del kept[axis]
    return f"{left} -> {' '.join(kept or ['1'])}"


def _reduce(node: Node) -> str:
    given = node.read(ReduceAttributes)
    axis = given.axis % len(node.inputs[0].shape)
    mark = "+" if node.type == "reduce_sum" else "^"
    return _reduced(node, axis, mark, given.keepdims)


def _argmax(node: Node) -> str:
    return _reduced(node, len(node.inputs[0].shape) - 1, "^", True)


def _transpose(node: Node) -> str:
    names = _names(node.inputs[0])
    return f"{' '.join(names)} -> {' '.join(names[p] for p in node.read(TransposeAttributes).perm)}"


def _along_axis(node: Node) -> str:
    """The annotation of ops that need all elements along an axis. Only the other dimensions may be
    cut.
    """
    axis = AlongAttributes.of(node.attrs).axis % len(node.outputs[0].shape)
    names = " ".join(n + "^" * (d == axis) for d, n in enumerate(_names(node.outputs[0])))
    return f"{', '.join([names] * len(node.inputs))} -> {names}"


def _heads(node: Node) -> str:
    """The annotation of rotary embeddings. If there is a single position, rows are not cut, because
    the positions of all rows are counted from the first one. If each row has its own position, rows
    may be cut.
    """
    row, position = ("x", "x") if node.inputs[1].elements > 1 else ("x^", "1")
    heads = f"{row} h/{node.read(RotaryAttributes).head_dim}"
    return f"{heads}, {position}, d^ -> {heads}"


def _attention(node: Node) -> str:
    """The annotation of attention. It may be cut by heads and batches, and by rows if the mask does
    not depend on the position of rows.
    """
    given = node.read(AttentionAttributes)
    query, keys = node.inputs[:2]
    position = node.inputs[3] if given.placed else None
    if position is not None and position.elements > 1:  # each row is a sequence of its own
        own = keys.shape[0] // position.elements
        sinks = ", h^" if given.sinks else ""
        return f"x h^, x/{own} c^ d^, x/{own} c^ d^, x{sinks} -> x h^"
    batch = "b " * (len(query.shape) - 2)
    rows = f"{batch}{'x^' if given.causal else 'x'} h/{given.head_dim}"
    cache = f"{batch}h c^ d^"
    others = ", 1" * (position is not None) + ", h" * given.sinks
    if given.mask:
        names = ("b" if batch else "1", "h", "x^" if given.causal else "x", "c^")
        sizes = node.inputs[-1].shape
        others += f", {' '.join('1' if n == 1 else x for n, x in zip(sizes, names, strict=True))}"
    return f"{rows}, {cache}, {cache}{others} -> {rows}"


def _paged_attention(node: Node) -> str:
    """The annotation of paged attention, which may be cut by heads."""
    given = node.read(AttentionAttributes)
    rows, cache = f"x^ h/{given.head_dim}", "p^ h g^ d^"
    return f"{rows}, {cache}, {cache}, s^ m^, s^{', h' * given.sinks} -> {rows}"


def _expert_linear(node: Node) -> str:
    """The annotation of an expert layer, which may be cut by experts. The result of a part is zero
    for the rows of other experts.
    """
    rows = "r s k+" if len(node.inputs[0].shape) == 3 else "r k+"
    return f"{rows}, {EXPERT}+ n k+, r s -> r s n"


def _append(node: Node) -> str:
    """The annotation of appending to a cache. It may be cut by heads, or by sequences if each row
    has its own position.
    """
    heads, _, width = node.outputs[0].shape
    sequences = node.inputs[1].elements
    if sequences > 1:
        own = heads // sequences
        return f"x h^, x, x/{own} c^ d^ -> x/{own} c^ d^"
    return f"x^ h/{width}, 1, h c^ d^ -> h c^ d^"


def _paged_append(node: Node) -> str:
    return f"x^ h/{node.outputs[0].shape[-1]}, s^ m^, s^, p^ h g^ d^ -> p^ h g^ d^"


def _embed(node: Node) -> str:
    """The annotation of an embedding look-up, which reads the rows of a table that tokens select.
    It may be cut by columns of the table.
    """
    position = "1" if node.inputs[2].elements == 1 else "p^"
    tokens = " ".join(f"{n}^" for n in LETTERS[: len(node.inputs[0].shape)])
    return f"{tokens}, v^ y, {position} -> x^ y"


def _reshape(node: Node) -> str:
    """The annotation of a reshape. The dimensions of both shapes are divided into runs, so that
    corresponding runs have the same number of elements. A run may be cut along its first dimension
    that is larger than 1.
    """
    sides = [list(node.inputs[0].shape), list(node.outputs[0].shape)]
    words: list[list[str]] = [[], []]
    names = iter(LETTERS)
    while any(sides):
        runs = [[side.pop(0)] if side else [1] for side in sides]
        while math.prod(runs[0]) != math.prod(runs[1]):
            short = int(math.prod(runs[1]) < math.prod(runs[0]))
            runs[short].append(sides[short].pop(0))
        shared, begun = next(names), [False, False]
        for k, run in enumerate(runs):
            for size in run:
                first = size > 1 and not begun[k]
                begun[k] |= first
                words[k].append(shared if first else "1" if size == 1 else next(names) + "^")
    shapes = (node.inputs[0].shape, node.outputs[0].shape)
    joined = [" ".join(w[: len(shape)]) for w, shape in zip(words, shapes, strict=True)]
    return " -> ".join(joined)


def _embedding(node: Node) -> str:
    names = " ".join(_names(node.inputs[0]))
    return f"{names}, y^ x -> {names} x"


def _gather(node: Node) -> str:
    """The annotation of a gather. The gathered axis is not cut; the other dimensions and the
    indices may be cut.
    """
    table, indices = node.inputs
    axis = AlongAttributes.of(node.attrs).axis % len(table.shape)
    names = list(_names(table))
    picked = list(LETTERS[len(names) : len(names) + len(indices.shape)])
    result = [*names[:axis], *picked, *names[axis + 1 :]]
    names[axis] += "^"
    return f"{' '.join(names)}, {' '.join(picked)} -> {' '.join(result)}"


def _matching(first: Sequence[int], second: Sequence[int], axis: int) -> list[str]:
    """The letters of the dimensions of two operands. The axis, and dimensions of different sizes,
    are not cut.
    """
    sizes = enumerate(zip(first, second, strict=True))
    return [LETTERS[d] + ("" if d != axis and n == m else "^") for d, (n, m) in sizes]


def _gather_elements(node: Node) -> str:
    """The annotation of an element-wise gather. The indices may be cut along the axis. The input is
    needed completely along it.
    """
    table, indices = node.inputs
    axis = AlongAttributes.of(node.attrs).axis % len(table.shape)
    names = _matching(table.shape, indices.shape, axis)
    picked = [*names]
    picked[axis] = LETTERS[len(names)]
    return f"{' '.join(names)}, {' '.join(picked)} -> {' '.join(picked)}"


def _scatter_elements(node: Node) -> str:
    """The annotation of a scatter. Dimensions other than the axis may be cut if the updates have
    the same size in them.
    """
    table, indices, updates = node.inputs
    axis = AlongAttributes.of(node.attrs).axis % len(table.shape)
    names = _matching(table.shape, updates.shape, axis)
    wide = zip(names, indices.shape, updates.shape, strict=True)
    at = " ".join("1" if n == 1 != m else name for name, n, m in wide)
    whole = " ".join(names)
    return f"{whole}, {at}, {whole} -> {whole}"


def _pool(node: Node) -> str:
    """The annotation of pooling. Examples and channels may be cut. Spatial dimensions stay whole,
    because windows overlap.
    """
    spatial = " ".join(f"{n}^" for n in LETTERS[2 : len(node.outputs[0].shape)])
    return f"a b {spatial} -> a b {spatial}"


def _unpool(node: Node) -> str:
    """The annotation of the gradient of max pooling, which may be cut as pooling may."""
    read, written = (
        " ".join(f"{n}^" for n in names[: len(node.outputs[0].shape) - 2])
        for names in (LETTERS[2:], LETTERS[5:])
    )
    return f"a b {read}, a b {read} -> a b {written}"


def _topk(node: Node) -> str:
    return "a b^ -> a b^"


RULES: dict[str, Callable[[Node], str]] = {
    "matmul": _matmul,
    "quantized_linear": _quantized_linear,
    "cast": elementwise_rule,
    "copy": elementwise_rule,
    "constant": elementwise_rule,
    "rope": _pairs,
    "softmax": _rows,
    "safe_softmax": _rows,
    "log_softmax": _rows,
    "layernorm": _rows,
    "rmsnorm": _rows,
    "rounded_rmsnorm": _rows,
    "reduce_sum": _reduce,
    "reduce_mean": _reduce,
    "reduce_max": _reduce,
    "reduce_min": _reduce,
    "reduce_prod": _reduce,
    "reduce_squares": _reduce,
    "reduce_logsumexp": _reduce,
    "argmax": _argmax,
    "topk": _topk,
    "transpose": _transpose,
    "remap": remap,
    "concat": _along_axis,
    "scan": _along_axis,
    "gather": _gather,
    "gather_elements": _gather_elements,
    "scatter_elements": _scatter_elements,
    "pool": _pool,
    "unpool": _unpool,
    "embedding": _embedding,
    "embed": _embed,
    "reshape": _reshape,
    "rotary_embedding": _heads,
    "attention": _attention,
    "paged_attention": _paged_attention,
    "expert_linear": _expert_linear,
    "kv_append": _append,
    "paged_append": _paged_append,
}
ENDS_RUN = "it may end the run, which all ranks do together"
COMPILED = "the compiler makes it, after a graph is split"
WHOLE: dict[str, str] = {
    "advance": "it moves the position of the whole text",
    "attention_gradient": COMPILED,
    "sample": ENDS_RUN,
    "sample_adjusted": ENDS_RUN,
    "sample_each": ENDS_RUN,
    "kv_cache_slot": "it writes one slot of a cache",
    "rope_kv": "its rows hold queries, keys and values side by side",
    "custom": "its body may read any element of its operands",
    "add_parts": COMPILED,
    "add_parts_norm": COMPILED,
    "choose": COMPILED,
    "choose_each": COMPILED,
    "convolution": COMPILED,
    "depthwise": COMPILED,
    "grouped_convolution": COMPILED,
    "fusion": COMPILED,
    "linear": COMPILED,
    "reduce_moments": COMPILED,
    "reduce_sums": COMPILED,
    "row_fusion": COMPILED,
    "row_values": COMPILED,
    "swiglu_pairs": COMPILED,
}
"""Ops that are not split, with the reason. Ops that move data between ranks are not in the list."""
