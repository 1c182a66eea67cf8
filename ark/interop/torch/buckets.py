"""Determines which dimensions of a torch graph may be padded, so that varying sizes can be rounded
up and fewer kernels are needed, and pads the arguments.

A size may be rounded up if no result that the caller sees depends on the added elements. This holds
if each operator works element by element along the padded dimension, or treats its indices
independently. `paddable` checks this for a graph, operator by operator. The table PERMITTED has a
rule for each operator; an operator without an entry permits no padding. Called by
ark.interop.torch.compile.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ark.interop.kernels import bucket
from ark.interop.torch.elementwise import ELEMENTWISE
from ark.interop.torch.graph import name_of
from ark.interop.torch.strides import laid_out


def symbols(value: Any) -> set[Any]:
    """The symbols that occur in a size or in a tensor's shape."""
    if isinstance(value, torch.Tensor):
        return set().union(*(symbols(n) for n in value.shape)) if value.dim() else set()
    return set(value.node.expr.free_symbols) if isinstance(value, torch.SymInt) else set()


def holding(value: Any, symbol: Any) -> set[int]:
    """The dimensions of a tensor whose size depends on a symbol."""
    if not isinstance(value, torch.Tensor):
        return set()
    return {d for d, n in enumerate(value.shape) if symbol in symbols(n)}


def multiple(size: Any, symbol: Any) -> int | None:
    """The number c if `size` is c times the symbol, for example 2 for 2 * s; otherwise None."""
    if not isinstance(size, torch.SymInt):
        return None
    rest = size.node.expr / symbol
    return int(rest) if rest.is_Integer and rest > 0 else None


class _Node:
    """A node as the rules of PERMITTED see it: its operands, and the symbolic size to pad."""

    def __init__(self, node: fx.Node, symbol: Any) -> None:
        self.node, self.symbol = node, symbol

    def value(self, place: int) -> Any:
        argument = self.node.args[place] if place < len(self.node.args) else None
        return argument.meta.get("val") if isinstance(argument, fx.Node) else argument

    def given(self, place: int, name: str, default: Any = None) -> Any:
        if place < len(self.node.args):
            return self.node.args[place]
        return self.node.kwargs.get(name, default)

    def dims(self, place: int = 0) -> set[int]:
        """The dimensions of an operand that depend on the symbol."""
        return holding(self.value(place), self.symbol)

    def rank(self, place: int = 0) -> int:
        operand = self.value(place)
        return operand.dim() if isinstance(operand, torch.Tensor) else 0

    def axes(self, given_axes: Any) -> set[int]:
        """The axes of the first operand as non-negative numbers. None or an empty list means all
        axes.
        """
        rank = max(self.rank(), 1)
        listed = [given_axes] if isinstance(given_axes, int) else list(given_axes or range(rank))
        return {a % rank for a in listed}


Rule = Callable[[_Node], bool]


def _anything(n: _Node) -> bool:
    return True


def _along(place: int, name: str) -> Rule:
    """The rule for an operator that works along the axes in one of its arguments. place, name: the
    position and the name of this argument. These axes must not be padded.
    """
    return lambda n: not n.dims() & n.axes(n.given(place, name, None))


def _first(*leading: int) -> Rule:
    """The rule that only the given dimensions of the first operand, and no other operands, may be
    padded.
    """

    def rule(n: _Node) -> bool:
        others = range(1, len(n.node.args))
        return n.dims() <= set(leading) and not any(n.dims(i) for i in others)

    return rule


def _product(left: int, right: int) -> Rule:
    """The rule for a matrix product of the arguments `left` and `right`. Rows, columns and batches
    may be padded; the result has the same padding. The summed dimension must not be padded.
    """

    def rule(n: _Node) -> bool:
        inner = n.rank(left) - 1, max(n.rank(right) - 2, 0)
        return inner[0] not in n.dims(left) and inner[1] not in n.dims(right)

    return rule


def _attention(n: _Node) -> bool:
    """The rule for attention. Batches and heads may be padded. Rows and keys may be padded together
    only if each row attends to no later key (causal attention).
    """
    rank = n.rank()
    batched = all(n.dims(i) <= set(range(rank - 2)) for i in range(3))
    names = [argument.name for argument in n.node.target._schema.arguments]  # type: ignore[union-attr]
    bias = "attn_mask" if "attn_mask" in names else "attn_bias"
    mask = n.given(names.index(bias), bias) if bias in names else None
    causal = bool(n.given(names.index("is_causal"), "is_causal", False))
    if mask is not None:
        return batched and not holding(getattr(mask, "meta", {}).get("val"), n.symbol)
    with_keys = all(rank - 2 in n.dims(i) and rank - 1 not in n.dims(i) for i in range(3))
    return batched or (causal and with_keys)


def _norm(n: _Node) -> bool:
    """The rule for norms over the last dimensions, which must not be padded."""
    sizes = n.given(1, "normalized_shape")
    rank = n.rank()
    return not n.dims() & set(range(rank - len(sizes), rank))


def _looked_up(n: _Node) -> bool:
    return not n.dims(0)


def _selected(n: _Node) -> bool:
    axis = n.given(1, "dim", 0)
    return not n.dims() & n.axes(axis)


def _joined(n: _Node) -> bool:
    axis = n.given(1, "dim", 0)
    parts = [v.meta["val"] for v in n.node.args[0]]  # type: ignore[union-attr]
    return not any(axis % v.dim() in holding(v, n.symbol) for v in parts)


_RESHAPES = ("view.default", "_unsafe_view.default", "reshape.default", "view_copy.default")
_VIEWS = (
    *(*_RESHAPES, "permute.default", "t.default"),
    *("squeeze.dim", "squeeze.dims", "squeeze.default", "unsqueeze.default", "transpose.int"),
    *("expand.default", "clone.default", "_to_copy.default", "alias.default", "detach.default"),
    *("permute_copy.default", "unsqueeze_copy.default", "expand_copy.default"),
)
_INDICES = ("arange.start_step", "arange.default", "arange.start")
_FILLED = ("full.default", "new_full.default", "empty.memory_format", "new_zeros.default")
_ALONG = (
    *("sum.dim_IntList", "mean.dim", "amax.default", "amin.default", "any.dim", "all.dim"),
    *("var.correction", "var_mean.correction", "argmax.default", "argmin.default", "max.dim"),
    *("min.dim", "cumsum.default", "logsumexp.default", "softmax.int", "_softmax.default"),
    *("_log_softmax.default", "_safe_softmax.default"),
)
PERMITTED: dict[str, Rule] = {
    **dict.fromkeys(_ALONG, _along(1, "dim")),
    **dict.fromkeys((*_VIEWS, *_INDICES), _anything),
    **dict.fromkeys(ELEMENTWISE, _anything),
    **dict.fromkeys(("mm.default", "bmm.default", "matmul.default"), _product(0, 1)),
    **dict.fromkeys(("addmm.default", "baddbmm.default"), _product(1, 2)),
    "linear.default": lambda n: n.rank() - 1 not in n.dims() and not n.dims(1),
    **dict.fromkeys(
        ("sum.dim_IntList", "mean.dim", "amax.default", "amin.default"), _along(1, "dim")
    ),
    **dict.fromkeys(
        ("var.correction", "var_mean.correction", "any.dim", "all.dim"), _along(1, "dim")
    ),
    **dict.fromkeys(
        ("cumsum.default", "logsumexp.default", "_safe_softmax.default"), _along(1, "dim")
    ),
    "native_layer_norm.default": _norm,
    "_fused_rms_norm.default": _norm,
    "convolution.default": _first(0),
    "_native_batch_norm_legit_no_training.default": _first(0, 2, 3),
    "native_batch_norm.default": _first(0, 2, 3),
    "native_group_norm.default": lambda n: False,
    **dict.fromkeys(("max_pool2d_with_indices.default", "avg_pool2d.default"), _first(0)),
    **dict.fromkeys(("_adaptive_avg_pool2d.default", "max_pool2d.default"), _first(0)),
    "embedding.default": _looked_up,
    "select.int": _selected,
    "slice.Tensor": _selected,
    "split_with_sizes.default": lambda n: not n.dims() & n.axes(n.given(2, "dim", 0)),
    "cat.default": _joined,
    "scaled_dot_product_attention.default": _attention,
    "ark.attention.default": _attention,
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "_scaled_dot_product_flash_attention.default": _attention,
    "_scaled_dot_product_efficient_attention.default": _attention,
    "_scaled_dot_product_cudnn_attention.default": _attention,
}


Around = dict[int, Any]  # by dimension with the symbol: the number of runs


def _around(node: fx.Node, symbol: Any, known: dict[fx.Node, Around]) -> Around | None:
    """Finds where the padding is in a node's result. For each dimension of the result that depends
    on the padded size s, returns the number of runs, which are sequences of elements that are each
    padded at the end. A dimension that joins dimensions (2, s) has two runs of s elements. A
    dimension that joins (s, 2) has one run. Returns None if the runs cannot be determined.
    """
    value = node.meta.get("val")
    parts = value if isinstance(value, (list, tuple)) else [value]
    dims = set().union(*(holding(v, symbol) for v in parts))
    sources = [n for n in node.all_input_nodes if known.get(n)]
    if name_of(node.target) not in _RESHAPES or not sources:
        runs_of = {runs for n in sources for runs in known[n].values()}
        if runs_of <= {1}:
            return dict.fromkeys(dims, 1)
        tensors = [*parts, *(n.meta.get("val") for n in sources)]
        sizes = {_expression(t.shape[d]) for t in tensors for d in holding(t, symbol)}
        return dict.fromkeys(dims, runs_of.pop()) if len(runs_of) == len(sizes) == 1 else None
    assert isinstance(value, torch.Tensor)
    before, after = sources[0].meta["val"].shape, value.shape
    result: Around = {}
    for d, runs in known[sources[0]].items():
        ahead = runs * _count(before[:d])
        for other in sorted(dims - result.keys()):
            now = sympy.cancel(ahead / _count(after[:other]))
            rest = sympy.cancel(_expression(after[other]) / (now * symbol))
            whole = all(x.as_numer_denom()[1] == 1 and x.is_positive for x in (now, rest))
            if whole and symbol not in now.free_symbols:
                result[other] = now
                break
        else:
            return None
    return result if result.keys() == dims else None


def _count(sizes: Sequence[Any]) -> Any:
    """The product of the sizes."""
    return math.prod(map(_expression, sizes), start=sympy.Integer(1))


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def paddable(module: fx.GraphModule, symbol: Any) -> str | None:
    """The reason why a graph's size must not be rounded up, or None if it may be."""
    around: dict[fx.Node, Around] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.op in ("placeholder", "output"):
            tensors = [value] if node.op == "placeholder" else _ends(node)
            for each in tensors:
                for d in sorted(holding(each, symbol)):
                    if multiple(each.shape[d], symbol) is None:
                        return f"{node.name} has a dimension of {each.shape[d]}"
            around[node] = dict.fromkeys(holding(value, symbol), 1)
            if any(runs != 1 for n in node.all_input_nodes for runs in around.get(n, {}).values()):
                return "a result has a dimension in which it is not the first factor"
            continue
        if node.op != "call_function" or not _touches(node, symbol):
            continue
        name = name_of(node.target)
        runs = _around(node, symbol, around)
        if runs is None:
            return f"{name} splits or merges dimensions that contain it"
        around[node] = runs
        if node.target is operator.getitem:
            continue
        if isinstance(value, torch.SymInt) or name.startswith("sym_size"):
            continue  # sizes occur in shapes only; the next check refuses arithmetic
        rule = PERMITTED.get(name)
        if rule is None:
            return f"{name or node.target} does not permit it"
        if _computes_with_sizes(node, name) or not rule(_Node(node, symbol)):
            return f"{name} works along it"
    return None


def _touches(node: fx.Node, symbol: Any) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    flat = [v for value in values for v in (value if isinstance(value, (list, tuple)) else [value])]
    return any(symbol in symbols(v) for v in flat)


def _computes_with_sizes(node: fx.Node, name: str) -> bool:
    """True if the node uses a size as a number and not as part of a shape."""
    numbers = node.args[2:] if name.startswith("new_") else node.args[1:]
    numbers = numbers if name in _FILLED else node.args
    operands = (n.meta.get("val") for n in numbers if isinstance(n, fx.Node))
    return name in ELEMENTWISE and any(isinstance(v, torch.SymInt) for v in operands)


def _ends(node: fx.Node) -> list[Any]:
    listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
    return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in listed]


class Padding:
    """Rounds up the sizes of a call's arguments, and removes the padding from its results."""

    def __init__(self, module: fx.GraphModule) -> None:
        places = [n for n in module.graph.nodes if n.op == "placeholder"]
        values = [n.meta.get("val") for n in places]
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        present = set().union(*(symbols(v) for v in values)) if values else set()
        self.reasons = {s: paddable(module, s) for s in sorted(present, key=str)}
        self.padded = [s for s, why in self.reasons.items() if why is None]
        self._values = values
        self._strides = [
            [_expression(n) for n in v.stride()] if isinstance(v, torch.Tensor) else []
            for v in _ends(output)
        ]
        sizes = [n for v in values for n in (v.shape if isinstance(v, torch.Tensor) else [v])]
        solved = {s for n in sizes for s in symbols(n) if multiple(n, s) is not None}
        if any(e.free_symbols - solved for strides in self._strides for e in strides):
            self.padded = []  # nothing is padded: the results' strides are unknown
        self._bounds = {s: _upper(values, s) for s in self.padded}
        self._inputs = [self._sizes(v) for v in values]
        self._outputs = [self._sizes(v) for v in _ends(output)]

    def _sizes(self, value: Any) -> list[tuple[int, Any, int]]:
        """The dimensions of an argument that must be padded, as (dimension, symbol, c) for a size
        of c times the symbol. The dimension is -1 if the argument itself is a size.
        """
        shape = value.shape if isinstance(value, torch.Tensor) else [value]
        first = 0 if isinstance(value, torch.Tensor) else -1
        each = ((first + d, s, multiple(n, s)) for d, n in enumerate(shape) for s in self.padded)
        return [(d, s, c) for d, s, c in each if c is not None]

    def strides(self, given: Sequence[Any]) -> list[list[int]]:
        """The strides of each result for these arguments, by torch's shape propagation."""
        known: dict[Any, int] = {}
        for value, now in zip(self._values, given, strict=True):
            tensor = isinstance(now, torch.Tensor)
            for size, n in zip(value.shape, now.shape, strict=True) if tensor else [(value, now)]:
                for symbol in symbols(size):
                    if (c := multiple(size, symbol)) is not None:
                        known[symbol] = n // c
        return [[int(e.subs(known)) for e in strides] for strides in self._strides]

    def sizes(self, given: Sequence[Any]) -> tuple[dict[Any, int], dict[Any, int]]:
        """For each symbol, its size in this call and the rounded size."""
        now: dict[Any, int] = {}
        for value, places in zip(given, self._inputs, strict=True):
            for d, symbol, c in places:
                now[symbol] = (value.shape[d] if d >= 0 else value) // c
        return now, {s: bucket(n, self._bounds[s]) for s, n in now.items()}

    def pad(self, given: Sequence[Any], now: dict[Any, int], up: dict[Any, int]) -> list[Any]:
        """Returns the arguments, padded with zeros to the rounded sizes. now: the exact size of
        each symbol. up: the rounded size of each symbol.
        """
        padded: list[Any] = []
        for value, places in zip(given, self._inputs, strict=True):
            places = [p for p in places if now[p[1]] != up[p[1]]]
            if places and isinstance(value, torch.Tensor):
                shape = list(value.shape)
                for d, symbol, c in places:
                    shape[d] = c * up[symbol]
                wide = value.new_zeros(shape)
                wide[tuple(slice(0, n) for n in value.shape)] = value
                value = wide
            elif places:
                value = places[0][2] * up[places[0][1]]
            padded.append(value)
        return padded

    def cut(self, results: Any, now: dict[Any, int], strides: Sequence[Sequence[int]]) -> Any:
        """The results without padding, in memory with the given strides."""
        cropped = []
        for value, places, steps in zip(results, self._outputs, strides, strict=True):
            for d, symbol, c in places:
                if isinstance(value, torch.Tensor):
                    value = value.narrow(d, 0, c * now[symbol])
                else:
                    value = c * now[symbol]
            cropped.append(laid_out(value, steps) if isinstance(value, torch.Tensor) else value)
        return cropped


def _upper(values: Sequence[Any], symbol: Any) -> int | None:
    """The upper bound that torch knows for a size, or None."""
    for value in values:
        for size in value.shape if isinstance(value, torch.Tensor) else [value]:
            if isinstance(size, torch.SymInt) and symbol in symbols(size):
                upper = size.node.shape_env.var_to_range[symbol].upper
                return int(upper) if upper.is_finite and upper < 1 << 31 else None
    return None
