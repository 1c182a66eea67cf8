"""Operators whose results have sizes that are known only at run time, such as NonZero. The host
computes such an operator with NumPy, after the kernel of the preceding nodes and before the kernel
of the following nodes. Called by ark.interop.onnx.stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx

from ark.errors import ModelError
from ark.interop.onnx import functions, trees
from ark.interop.onnx.fold import fold
from ark.interop.onnx.values import Call, ContentsNeededError, Value, operator

Arrays = list[np.ndarray | None]


_SIZED = ("NonMaxSuppression", "NonZero", "Unique")
OPERATORS = (*_SIZED, "TreeEnsemble", "TreeEnsembleRegressor")


@operator(*_SIZED)
def _on_the_host(call: Call) -> Value:
    seen = (v.inputs for v in call.inputs if v is not None)
    raise ContentsNeededError(frozenset[str]().union(*seen))


def computed(node: onnx.NodeProto, given: Arrays, version: int) -> list[np.ndarray]:
    """The results of a node that the host computes. given: its inputs. version: the version of the
    operator's definition.
    """
    attributes = functions.attributes(node)
    if node.op_type in FAST:
        return [FAST[node.op_type](given, attributes)]
    if node.op_type.startswith("TreeEnsemble") and given[0] is not None:
        return [trees.on_host(node.op_type, given[0], attributes)]
    values = [None if a is None else Value(a.shape, array=a) for a in given]
    return [v.array for v in fold(node, values, version) if v.array is not None]


def _non_zero(given: Arrays, attributes: Any) -> np.ndarray:
    (x,) = given
    assert x is not None
    return np.stack(np.nonzero(np.atleast_1d(x))).astype(np.int64)[: max(x.ndim, 0)]


def _corners(boxes: np.ndarray, centred: bool) -> np.ndarray:
    """The corners of `boxes`, an array (boxes, 4), as two coordinates of the lower corner and two
    of the upper corner. centred: True if a box is given by its centre and its size.
    """
    if centred:
        middle, half = boxes[:, :2], boxes[:, 2:] / 2
        return np.concatenate([middle - half, middle + half], 1)
    return np.concatenate(
        [np.minimum(boxes[:, :2], boxes[:, 2:]), np.maximum(boxes[:, :2], boxes[:, 2:])], 1
    )


def _overlaps(one: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For non-maximum suppression: the intersection over union of the box `one` with each of the
    boxes `others`; 0 if either has no area.
    """
    inner = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    shared = np.prod(np.maximum(inner, 0), axis=1)
    areas = np.prod(others[:, 2:] - others[:, :2], axis=1)
    own = np.prod(one[2:] - one[:2])
    union = own + areas - shared
    there = (shared > 0) & (areas > 0) & (own > 0) & (union > 0)
    return np.where(there, shared / np.where(there, union, 1), 0)


def _scalar(given: Arrays, place: int, default: Any) -> Any:
    array = given[place] if place < len(given) else None
    return default if array is None or not array.size else array.reshape(-1)[0]


def _suppressed(given: Arrays, attributes: Any) -> np.ndarray:
    """Non-maximum suppression: for each class, the best boxes, without boxes that overlap a better
    one by more than the threshold. Rows are (batch, class, box).
    """
    boxes, scores = given[0], given[1]
    if boxes is None or scores is None or boxes.ndim != 3 or scores.ndim != 3:
        raise ModelError("NonMaxSuppression needs boxes and scores of three dimensions")
    most = int(_scalar(given, 2, 0))
    overlap, least = _scalar(given, 3, 0.0), _scalar(given, 4, None)
    rows = []
    for batch, classes in enumerate(scores):
        ends = _corners(boxes[batch], bool(attributes.get("center_point_box", 0)))
        for number, score in enumerate(classes):
            left = np.argsort(-score, kind="stable")
            if least is not None:
                left = left[score[left] > least]
            taken = 0
            while len(left) and taken < most:
                best, left = left[0], left[1:]
                rows.append((batch, number, best))
                taken += 1
                left = left[_overlaps(ends[best], ends[left]) <= overlap]
    return np.array(rows, np.int64).reshape(-1, 3)


FAST: dict[str, Callable[[Arrays, Any], np.ndarray]] = {
    "NonMaxSuppression": _suppressed,
    "NonZero": _non_zero,
}
