"""Folds nodes whose inputs are known while the graph is built: ONNX's reference evaluator computes
their results. Called by ark.interop.onnx.convert.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from ark.errors import UnsupportedError
from ark.interop.onnx.values import Value

MAX_FOLDED_INPUT_ELEMENTS = 4096  # limit for all inputs of a folded node together
MAX_FOLDED_RESULT_ELEMENTS = 1 << 24  # limit for all results of a folded node
_ALWAYS_FOLDED = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
_GROWS = ("ConstantOfShape", "Expand", "Range", "Tile", "Pad", "Resize", "OneHot", "EyeLike")
_OWN = ("Constant", "Shape", "Size", "Dropout", "If", "Loop", "Scan")


def foldable(op: str, given: list[Value | None]) -> bool:
    """True if all inputs of the node are known and the node is small enough to be folded."""
    present = [v for v in given if v is not None]
    arrays = [v.array for v in present if v.array is not None]
    if (
        op in _OWN
        or "Sequence" in op
        or op.startswith("Optional")
        or not given
        or len(arrays) < len(present)
    ):
        return False
    if op in _ALWAYS_FOLDED:
        return True
    if any(a.size == 0 for a in arrays):
        return True  # ark has no empty tensors, so operators on empty arrays are folded
    if sum(a.size for a in arrays) > MAX_FOLDED_INPUT_ELEMENTS:
        return False
    return op not in _GROWS or _made_elements(op, arrays) <= MAX_FOLDED_RESULT_ELEMENTS


def _made_elements(op: str, arrays: list[Any]) -> float:
    """An estimate of the number of elements that a node produces whose inputs contain sizes, such
    as Expand or Range. It is a float, which cannot overflow.
    """
    if op == "Range":
        start, limit, delta = (float(a.item()) for a in arrays)
        return abs(limit - start) / abs(delta) if delta else 0.0
    if op == "ConstantOfShape":
        return float(np.prod(arrays[0].astype(np.float64)))
    if op == "Expand":
        return float(np.prod(np.maximum(arrays[1], 1).astype(np.float64))) * float(arrays[0].size)
    if op == "Tile":
        return float(np.prod(np.maximum(arrays[1], 1).astype(np.float64))) * float(arrays[0].size)
    return float("inf")


def fold(node: onnx.NodeProto, given: list[Value | None], version: int) -> list[Value]:
    """The results of one node whose inputs are known, computed by ONNX's reference evaluator."""
    feeds = {n: v.array for n, v in zip(node.input, given, strict=False) if n and v is not None}
    graph = onnx.helper.make_graph(
        [node],
        "one",
        [onnx.helper.make_empty_tensor_value_info(n) for n in feeds],
        [onnx.helper.make_empty_tensor_value_info(n) for n in node.output if n],
    )
    opset = onnx.helper.make_opsetid("", version)
    try:
        single = onnx.helper.make_model(graph, opset_imports=[opset])
        outputs = iter(ReferenceEvaluator(single).run(None, feeds))
    except Exception as error:  # onnx's code may raise any error for unusual values
        raise UnsupportedError(f"it cannot be computed: {error}") from error
    results = []
    for name in node.output:
        array = np.asarray(next(outputs)) if name else np.zeros(0)
        results.append(Value(array.shape, array=array))
    return results
