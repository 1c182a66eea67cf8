"""Converts ensembles of decision trees. All rows descend all trees at the same time: at each level,
gathers from tables of the nodes find the next node. Ensembles of float64 are computed on the host,
because a comparison in fp32 may have another result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import ark
from ark.errors import ModelError
from ark.interop.onnx.values import Call, ContentsNeededError, Value, operator, refuse, shaped

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ")
_COMPARE = (ark.less_equal, ark.less, ark.greater_equal, ark.greater, ark.equal, ark.not_equal)
Attributes = Mapping[str, Any]
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")


@dataclass(frozen=True)
class _Trees:
    """The nodes of all trees, as arrays that are indexed by a node's number. yes, no: the number of
    the next node if the node's comparison is true, and if it is false. Both successors of a leaf
    are the leaf itself. weights: (nodes, targets).
    """

    features: np.ndarray
    splits: np.ndarray
    modes: np.ndarray
    yes: np.ndarray
    no: np.ndarray
    missing: np.ndarray  # 1 if a NaN takes the branch `yes`, otherwise 0
    weights: np.ndarray
    roots: np.ndarray
    aggregate: str
    base: np.ndarray  # added to the results; empty if nothing is added

    def depth(self) -> int:
        """The number of levels below the roots. Raises ModelError if nodes form a cycle."""
        level, steps = np.unique(self.roots), 0
        while np.any((self.yes[level] != level) | (self.no[level] != level)):
            level = np.unique(np.concatenate([self.yes[level], self.no[level]]))
            steps += 1
            if steps > len(self.yes):
                raise ModelError("the nodes of a tree form a cycle")
        return steps


def _list(attributes: Attributes, name: str, default: Any = ()) -> np.ndarray:
    return np.asarray(attributes.get(name, default), np.int64)


def _ensemble(attributes: Attributes) -> _Trees:
    """The trees of a TreeEnsemble, in which leaves are numbered separately from other nodes."""
    modes = np.asarray(attributes["nodes_modes"], np.int64)
    splits, leaves = (np.asarray(attributes[n]) for n in ("nodes_splits", "leaf_weights"))
    inner, targets = len(modes), int(attributes.get("n_targets", 1))
    own = np.arange(len(leaves)) + inner
    yes, no = (
        _list(attributes, f"nodes_{side}nodeids") + inner * _list(attributes, f"nodes_{side}leafs")
        for side in ("true", "false")
    )
    weights = np.zeros((inner + len(leaves), targets), leaves.dtype)
    weights[own, _list(attributes, "leaf_targetids")] = leaves
    zeros = np.zeros(len(leaves), np.int64)
    tracks = _list(attributes, "nodes_missing_value_tracks_true", [0] * inner)
    if attributes.get("post_transform", 0):
        raise refuse("an ensemble of trees with a post_transform")
    return _Trees(
        np.concatenate([_list(attributes, "nodes_featureids"), zeros]),
        np.concatenate([splits, zeros.astype(splits.dtype)]),
        np.concatenate([modes, zeros]),
        np.concatenate([yes, own]),
        np.concatenate([no, own]),
        np.concatenate([tracks, zeros]),
        weights,
        _list(attributes, "tree_roots"),
        _AGGREGATES[attributes.get("aggregate_function", 1)],
        np.zeros(0),
    )


def _regressor(attributes: Attributes) -> _Trees:
    """The trees of a TreeEnsembleRegressor, in which nodes are identified by their tree and a
    number.
    """

    def listed(name: str, default: Any = ()) -> Any:
        return attributes.get(f"{name}_as_tensor", attributes.get(name, default))

    names = list(zip(listed("nodes_treeids"), listed("nodes_nodeids"), strict=True))
    index = {name: i for i, name in enumerate(names)}
    count, splits = len(names), np.asarray(listed("nodes_values"))
    dtype = splits.dtype if "nodes_values_as_tensor" in attributes else np.dtype(np.float32)
    modes = [m.decode() if isinstance(m, bytes) else m for m in listed("nodes_modes")]

    def followed(side: str) -> np.ndarray:
        rows = zip(names, listed(f"nodes_{side}nodeids"), modes, strict=True)
        ends = [i if m == "LEAF" else index[name[0], to] for i, (name, to, m) in enumerate(rows)]
        return np.array(ends, np.int64)

    weights = np.zeros((count, int(listed("n_targets", 1))), dtype)
    ids = (listed(f"target_{n}") for n in ("treeids", "nodeids", "ids", "weights"))
    for tree, node, target, weight in zip(*ids, strict=True):
        weights[index[tree, node], target] += weight
    if listed("post_transform", "NONE") != "NONE":
        raise refuse("an ensemble of trees with a post_transform")
    return _Trees(
        _list(attributes, "nodes_featureids"),
        splits.astype(dtype),
        np.array([0 if m == "LEAF" else _MODES.index(m) for m in modes]),
        followed("true"),
        followed("false"),
        _list(attributes, "nodes_missing_value_tracks_true", [0] * count),
        weights,
        np.array([index[name] for name in {tree: (tree, n) for tree, n in names[::-1]}.values()]),
        listed("aggregate_function", "SUM"),
        np.asarray(listed("base_values"), dtype),
    )


_READ = {"TreeEnsemble": _ensemble, "TreeEnsembleRegressor": _regressor}


def _checked(op: str, attributes: Attributes) -> _Trees:
    trees = _READ[op](attributes)
    if trees.aggregate in ("MIN", "MAX") and trees.weights.shape[1] > 1:
        raise refuse(
            f"an ensemble of trees with several targets and aggregate_function {trees.aggregate}"
        )
    if not 0 <= trees.modes.min(initial=0) <= trees.modes.max(initial=0) < len(_MODES):
        raise refuse("an ensemble of trees with nodes of the mode BRANCH_MEMBER")
    return trees


def on_host(op: str, x: np.ndarray, attributes: Attributes) -> np.ndarray:
    """The results of an ensemble for the rows `x` of any float type, computed on the host in the
    type of the ensemble.
    """
    trees = _checked(op, attributes)
    at = np.broadcast_to(trees.roots, (len(x), len(trees.roots)))
    compare: list[Callable[..., Any]] = [np.less_equal, np.less, np.greater_equal, np.greater]
    compare += [np.equal, np.not_equal]
    for _ in range(trees.depth()):
        value, edge = np.take_along_axis(x, trees.features[at], 1), trees.splits[at]
        goes = np.isnan(value) & (trees.missing[at] > 0)
        mode = trees.modes[at]
        for kind in np.unique(trees.modes):
            goes |= (mode == kind) & compare[kind](value, edge)
        at = np.where(goes, trees.yes[at], trees.no[at])
    leaves = trees.weights[at]
    aggregates: dict[str, Callable[..., Any]] = {"MIN": np.min, "MAX": np.max, "AVERAGE": np.mean}
    result = aggregates.get(trees.aggregate, np.sum)(leaves, axis=1)
    result = result + trees.base if len(trees.base) else result
    return np.asarray(result, trees.weights.dtype)


@operator("ai.onnx.ml::TreeEnsemble", "ai.onnx.ml::TreeEnsembleRegressor")
def _run(call: Call) -> Value:
    """Converts an ensemble: the rows descend all levels of all trees, then the weights of the
    reached leaves are combined.
    """
    trees, shape = _checked(call.op, call.attributes), call.shape(0)
    if trees.splits.dtype != np.float32 or call.dtype(0) != ark.fp32:
        raise ContentsNeededError(call.value(0).inputs)
    x, rows, targets = call.tensor(0), shape[0], trees.weights.shape[1]

    def table(array: np.ndarray, dtype: Any) -> Any:
        return call.constant(np.ascontiguousarray(array.astype(dtype)))

    split, feature = table(trees.splits, np.float32), table(trees.features, np.int32)
    yes, no = table(trees.yes, np.int32), table(trees.no, np.int32)
    kinds = sorted(set(trees.modes.tolist()))
    mode = table(trees.modes, np.int32)
    tracks: Any = table(trees.missing, np.int32) if trees.missing.any() else None
    at = ark.expand(table(trees.roots[None], np.int32), [rows, len(trees.roots)])
    for _ in range(trees.depth()):
        value = ark.gather_elements(x, ark.gather(feature, at, 0), 1)
        edge = ark.gather(split, at, 0)
        goes = _COMPARE[kinds[0]](value, edge)
        for kind in kinds[1:]:
            here = ark.equal(ark.gather(mode, at, 0), kind)
            goes = ark.where(here, _COMPARE[kind](value, edge), goes)
        if tracks is not None:
            tracked = ark.greater(ark.gather(tracks, at, 0), 0)
            goes = ark.logical_or(goes, ark.logical_and(ark.isnan(value), tracked))
        at = ark.where(goes, ark.gather(yes, at, 0), ark.gather(no, at, 0))
    leaves = ark.gather(table(trees.weights, np.float32), at, 0)  # (rows, trees, targets)
    aggregates = {"MIN": ark.reduce_min, "MAX": ark.reduce_max, "AVERAGE": ark.reduce_mean}
    result = ark.reshape(
        aggregates.get(trees.aggregate, ark.reduce_sum)(leaves, [1]), [rows, targets]
    )
    if len(trees.base):
        result = ark.add(result, table(trees.base.reshape(1, -1), np.float32))
    return shaped(result, (rows, targets))
