"""Cases and helpers of tests/interop/test_onnx_forms.py, which other tests use too."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from ark.interop.onnx.model import from_proto

n = helper.make_node
FLOAT, DOUBLE, INT64, BOOL = (
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.INT64,
    TensorProto.BOOL,
)


def network(
    nodes: list[Any],
    inputs: dict[str, Any],
    outputs: dict[str, Any],
    opset: int = 17,
    **weights: Any,
) -> onnx.ModelProto:
    """Returns a model of these nodes. inputs and outputs: element type and shape by name."""
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()],
        [numpy_helper.from_array(np.asarray(a), name) for name, a in weights.items()],
    )
    version = 3 if opset < 9 else 8
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=version
    )


def same(proto: onnx.ModelProto, **arrays: Any) -> None:
    model = from_proto(proto)
    wanted = ReferenceEvaluator(proto).run(None, arrays)
    for got, want in zip(model.run(arrays), wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    model.close()
