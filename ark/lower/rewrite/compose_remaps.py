"""Replaces consecutive copies by one. The copies are those by index arithmetic (shifts, slices) and
transposes. Swin (Liu et al. 2021) has many: it shifts an image and then cuts it into windows, joins
windows and shifts the image back, or takes every other row and then every other column.

A copy is not changed if it adds elements (`fill`), if the combined copy would no longer read whole
runs of the last dimension, or if a product reads its result as convolution windows. Slices of one
tensor that are concatenated along the last dimension become one copy too. Listed in
ark.lower.passes.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from msgspec import structs

from ark.ir.attributes import AxisAttributes, RemapAttributes, TransposeAttributes
from ark.ir.graph import Graph, Node
from ark.ir.values import MAX_DIMS, Tensor
from ark.lower.rewrite.context import Context
from ark.lower.rewrite.fuse_chains import read_once
from ark.lower.rewrite.makers import only_makers, replaceable
from ark.lower.rewrite.views import groups, in_shape, same_elements, whole
from ark.tasks.remap import Rule

Map = list[Rule]


def compose_remaps(graph: Graph, context: Context) -> Graph:
    """A copy of the graph in which each chain of copies is replaced by one copy; the graph itself
    if it has no such chain.
    """
    while (composed := _composed(graph, context.kept)) is not None:
        graph = composed
    return graph


def _composed(graph: Graph, kept: frozenset[int]) -> Graph | None:
    """The graph with the first two copies of each chain replaced by one; None if it has no
    chain.
    """
    private, makers = read_once(graph, kept), only_makers(graph)
    replaced: dict[int, Node] = {}
    taken: set[int] = set()
    later: set[int] = set()  # ids of nodes whose sources change in this round
    for node in graph.nodes:
        before = [makers.get(t.buffer.id) for t in node.inputs]
        sources = [n for n in before if n is not None and private(n.outputs[0])]
        if not before or len(sources) != len(before) or not all(map(_movable, (node, *sources))):
            continue
        if any(n.id in replaced or n.id in later for n in sources):
            later.add(node.id)
            continue
        if any(
            n.placement != node.placement or not graph.view.steady(n.inputs[:1], n, node)
            for n in sources
        ):
            continue
        if node.type == "concat":
            joined = _of_slices(node, sources)
        else:
            joined = None if _windows(graph, node) else _of_two(sources[0], node)
        if joined is not None:
            replaced[node.id] = joined
            taken.update(n.id for n in sources)
    if not replaced:
        return None
    return graph.with_nodes(replaced.get(n.id, n) for n in graph.nodes if n.id not in taken)


def _movable(node: Node) -> bool:
    """True for a copy whose result fills its buffer and that has no user hints."""
    if not replaceable(node):
        return False
    out = node.outputs[0]
    return node.type in ("remap", "transpose", "concat") and whole(out) and not out.dtype.packed


def _windows(graph: Graph, node: Node) -> bool:
    """True for a copy whose result a product reads as convolution windows."""
    (out,) = node.outputs
    numbers = graph.view.touching[out.buffer.id] - {node.id}
    readers = (graph.nodes[graph.view.places[n]] for n in numbers)
    return node.type == "remap" and any(n.type == "matmul" for n in readers)


def _rules(node: Node) -> Map | None:
    """The index rules by which a copy finds the source element of each result element; None if the
    copy also adds elements that are not in the source.
    """
    if node.type == "transpose":
        perm = node.read(TransposeAttributes).perm
        return [Rule(((perm.index(d), 1),), 0, 1, "fill") for d in range(len(perm))]
    if node.type != "remap":
        return None
    shape = node.outputs[0].shape
    rules = [
        Rule(tuple((d, f) for d, f in terms), add, divide, edge)
        for terms, add, divide, edge in node.read(RemapAttributes).rules
    ]
    for d, n in enumerate(node.inputs[0].shape):
        if _inside(rules[d], shape, n):
            rules[d] = structs.replace(rules[d], edge="fill")
        elif rules[d].edge != "wrap":
            return None
    return rules


def _inside(rule: Rule, shape: Sequence[int], n: int) -> bool:
    """True for an index rule without division whose indices are all from 0 to n - 1."""
    ends = [f * (shape[d] - 1) for d, f in rule.terms]
    low = rule.add + sum(min(0, end) for end in ends)
    high = rule.add + sum(max(0, end) for end in ends)
    return rule.divide == 1 and rule.edge != "exact" and low >= 0 and high < n


def _of_two(first: Node, last: Node) -> Node | None:
    """One copy node that does the same as the copy node `first` followed by the copy node `last`,
    which reads its result. None if no single copy does, or if both nodes are transposes.
    """
    if "concat" in (first.type, last.type) or first.type == last.type == "transpose":
        return None
    inner, outer = _rules(first), _rules(last)
    (middle,), (read,), (out,) = first.outputs, last.inputs, last.outputs
    if inner is None or outer is None or not same_elements(read, middle):
        return None
    between = _between(outer, read.shape, middle.shape, out.shape)
    if between is None:
        return None
    rules: Map = []
    for rule, n in zip(inner, first.inputs[0].shape, strict=True):
        composed = _through(rule, between, middle.shape, n)
        if composed is None:
            return None
        rules.append(composed)
    return _copy(last, first.inputs[0], out, rules)


def _copy(like: Node, source: Tensor, out: Tensor, rules: Map) -> Node | None:
    """A copy node with these index rules in place of the node `like`; None if it would not read
    whole runs of the last dimension.
    """
    runs = rules[-1].terms == ((len(out.shape) - 1, 1),) and rules[-1].add == 0
    if not runs or source.shape[-1] != out.shape[-1] or len(out.shape) > MAX_DIMS:
        return None
    texts = [[[list(t) for t in r.terms], r.add, r.divide, r.edge] for r in rules]
    attrs = RemapAttributes(rules=texts, fill=0.0, shape=list(out.shape))
    return dataclasses.replace(
        like, type="remap", inputs=(source,), outputs=(out,), attrs=attrs.to_node()
    )


def _between(
    outer: Map, read: Sequence[int], middle: Sequence[int], out: Sequence[int]
) -> Map | None:
    """Adapts the index rules `outer` of a copy to a source that is viewed in another shape. read:
    the shape for which the rules are given. middle: the shape of the new view. out: the shape of
    the copy's result. None if no rules express the copy from the new view.
    """
    rules: Map = []
    for old, new in groups(read, middle):
        sizes = [middle[d] for d in new]
        if len(old) == 1:
            (rule,) = outer[old.start : old.stop]
            if len(new) == 1:
                rules.append(rule)
                continue
            if rule.divide > 1:
                return None
            steps = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
            rules += [Rule(rule.terms, rule.add, step, "wrap") for step in steps]
        elif len(new) <= 1 and all(_inside(outer[d], out, read[d]) for d in old):
            terms: list[tuple[int, int]] = []
            add = 0
            for d in old:
                step = math.prod(read[d + 1 : old.stop])
                terms += [(t, f * step) for t, f in outer[d].terms]
                add += outer[d].add * step
            if new:
                rules.append(Rule(tuple(terms), add, 1, "fill"))
        else:
            return None
    return rules


def _through(rule: Rule, between: Map, middle: Sequence[int], n: int) -> Rule | None:
    """Composes the index rules of two consecutive copies, for one dimension of the source. rule:
    how the first copy computes the index in this dimension from the indices of its result. between:
    the rules by which the second copy computes those indices from the indices of its own result.
    middle: the shape of the tensor between the copies. n: the size of the source's dimension. None
    if no single rule expresses the composition.
    """
    if len(rule.terms) == 1 and rule.terms[0][1] == 1 and rule.divide == 1:
        ((d, _),) = rule.terms
        at = between[d]
        if rule.add == 0 and middle[d] == n:
            return at
        if at.edge == rule.edge == "wrap" and middle[d] == n:
            return Rule(at.terms, at.add + rule.add * at.divide, at.divide, "wrap")
    terms: list[tuple[int, int]] = []
    add = rule.add
    for d, f in rule.terms:
        at = between[d]
        if at.edge == "wrap" or at.divide > 1:
            return None
        terms += [(t, f * g) for t, g in at.terms]
        add += f * at.add
    return Rule(tuple(terms), add, rule.divide, rule.edge)


def _of_slices(node: Node, slices: Sequence[Node]) -> Node | None:
    """The copy that replaces slices of one tensor and their concatenation along the last dimension.
    The number of a slice is written with one or two digits (see _digits), and each digit becomes a
    dimension of the copy. None if the slices' offsets do not grow by a fixed step with each digit.
    """
    (out,), first = node.outputs, slices[0].inputs[0]
    axis, rank = node.read(AxisAttributes).axis, len(out.shape)
    each = [_rules(n) for n in slices if n.type == "remap"]
    known = [r for r in each if r is not None]
    alike = len(known) == len(slices) and all(
        n.inputs[0].buffer.id == first.buffer.id
        and n.inputs[0].offsets == first.offsets
        and n.inputs[0].shape == first.shape
        and n.outputs[0].shape == slices[0].outputs[0].shape
        and same_elements(t, n.outputs[0])
        and t.shape == n.outputs[0].shape
        for n, t in zip(slices, node.inputs, strict=True)
    )
    if not alike or axis % rank != rank - 1 or rank > len(first.shape):
        return None
    if any(
        r.edge == "wrap" or (r.terms, r.divide) != (s.terms, s.divide)
        for rules in known
        for r, s in zip(rules, known[0], strict=True)
    ):
        return None
    adds = [[r.add for r in rules] for rules in known]
    for digits in _digits(len(slices)):
        steps = _steps(adds, digits)
        wide = (*out.shape[:-1], *digits, slices[0].outputs[0].shape[-1])
        view = in_shape(out, wide, named=True)
        if steps is None or view is None or len(wide) > MAX_DIMS:
            continue
        last, rules = rank - 1 + len(digits), []
        for d, rule in enumerate(known[0]):
            terms = [(last if t == rank - 1 else t, f) for t, f in rule.terms]
            terms += [(rank - 1 + k, step[d]) for k, step in enumerate(steps) if step[d]]
            rules.append(structs.replace(rule, terms=tuple(terms)))
        return _copy(node, first, view, rules)
    return None


def _digits(count: int) -> Iterator[tuple[int, ...]]:
    """Each way to number `count` slices by one digit or by two: the number of values of each digit,
    the most significant digit first.
    """
    yield (count,)
    for n in range(2, count):
        if count % n == 0:
            yield (n, count // n)


def _steps(adds: Sequence[Sequence[int]], digits: Sequence[int]) -> list[list[int]] | None:
    """For each digit of a slice's number, the steps by which a slice's offsets grow if the digit
    grows by 1: one step for each dimension. None if an offset does not grow by fixed steps. adds:
    the offsets of all slices. digits: the number of values of each digit.
    """
    numbers = list(itertools.product(*map(range, digits)))
    units = [math.prod(digits[k + 1 :]) for k in range(len(digits))]
    steps = [[a - b for a, b in zip(adds[u], adds[0], strict=True)] for u in units]
    for number, own in zip(numbers, adds, strict=True):
        moved = [
            start + sum(n * step[d] for n, step in zip(number, steps, strict=True))
            for d, start in enumerate(adds[0])
        ]
        if moved != list(own):
            return None
    return steps
