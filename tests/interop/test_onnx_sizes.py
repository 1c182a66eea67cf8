"""ONNX models with variable sizes: they are rounded up where the operators permit it, and results
equal those with exact sizes (onnx's reference evaluator).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

import ark
from ark.interop.onnx.model import OnnxModel, from_proto

RNG = np.random.default_rng(5)
WEIGHTS: dict[str, np.ndarray] = {
    "w": RNG.standard_normal((4, 6)).astype(np.float32),
    "b": RNG.standard_normal(6).astype(np.float32),
    "g": np.ones(4, np.float32),
    "filter": RNG.standard_normal((3, 1, 3, 3)).astype(np.float32),
    "table": RNG.standard_normal((9, 4)).astype(np.float32),
    "flat": np.array([-1, 8], np.int64),
    "image": np.array([0, 1, 2, 2], np.int64),
    "zero": np.array(0, np.int64),
    "one": np.array(1, np.int64),
    "first": np.array([0], np.int64),
    "last": np.array([-1], np.int64),
    "axis1": np.array([1], np.int64),
    "many": np.array([1 << 40], np.int64),
}
n = helper.make_node
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model(nodes: Sequence[Any], sizes: dict[str, Sequence[Any]], kind: int = FLOAT) -> Any:
    """Returns a model with inputs of these sizes and result y."""
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in sizes.items()],
        [helper.make_empty_tensor_value_info("y")],
        [numpy_helper.from_array(a, name) for name, a in WEIGHTS.items() if name in used],
    )
    graph.output[0].type.tensor_type.elem_type = FLOAT
    opset = [helper.make_opsetid("", 18)]
    result = helper.make_model(graph, opset_imports=opset, ir_version=9)
    return shape_inference.infer_shapes(result, data_prop=True)  # infers the result's shape


ROWS = {"x": ["rows", 4]}
PADDED = {
    "dense": model(
        [n("Gemm", ["x", "w", "b"], ["h"]), n("Log", ["h"], ["l"]), n("Softmax", ["l"], ["y"])],
        ROWS,
    ),
    "norm": model(
        [
            n("MatMul", ["x", "w"], ["h"]),
            n("ReduceMean", ["h", "last"], ["m"]),
            n("Sub", ["h", "m"], ["c"]),
            n("Abs", ["c"], ["y"]),
        ],
        ROWS,
    ),
    "layer": model([n("LayerNormalization", ["x", "g"], ["y"])], ROWS),
    "image": model(
        [
            n("Reshape", ["x", "image"], ["i"]),
            n("Conv", ["i", "filter"], ["c"], pads=[1, 1, 1, 1]),
            n("GlobalAveragePool", ["c"], ["p"]),
            n("Flatten", ["p"], ["y"]),
        ],
        ROWS,
    ),
    "pairs": model(
        [
            n("Transpose", ["z"], ["t"], perm=[1, 0]),
            n("MatMul", ["x", "t"], ["h"]),
            n("Trilu", ["h"], ["y"]),
        ],
        {"x": ["rows", 4], "z": ["columns", 4]},
    ),
    "by shape": model(
        [
            n("Shape", ["x"], ["s"]),
            n("Gather", ["s", "first"], ["r"]),
            n("Concat", ["r", "last"], ["to"], axis=0),
            n("Unsqueeze", ["x", "axis1"], ["u"]),
            n("Reshape", ["u", "to"], ["v"]),
            n("CumSum", ["v", "zero"], ["y"]),
        ],
        ROWS,
    ),
}
EXACT = {
    "sum": model([n("ReduceSum", ["x", "first"], ["m"]), n("Add", ["x", "m"], ["y"])], ROWS),
    "joined": model([n("Concat", ["x", "x"], ["y"], axis=0)], ROWS),
    "mean by size": model(
        [
            n("Shape", ["x"], ["s"]),
            n("Gather", ["s", "zero"], ["r"]),
            n("Cast", ["r"], ["f"], to=FLOAT),
            n("Div", ["x", "f"], ["y"]),
        ],
        ROWS,
    ),
    "reversed": model([n("CumSum", ["x", "zero"], ["y"], reverse=1)], ROWS),
    "halves": model([n("Reshape", ["x", "flat"], ["y"])], {"x": [4, "rows"]}),
    "inner": model(
        [n("Transpose", ["x"], ["t"], perm=[1, 0]), n("MatMul", ["t", "x"], ["y"])], ROWS
    ),
    "last row": model([n("Gather", ["x", "last"], ["y"])], ROWS),
}
MODELS: dict[str, OnnxModel] = {}


@pytest.fixture(autouse=True, scope="module")
def on_the_cpu() -> Iterator[None]:
    ark.init(backend="cpu")
    yield
    for each in MODELS.values():
        each.close()


def loaded(name: str) -> OnnxModel:
    if name not in MODELS:
        MODELS[name] = from_proto({**PADDED, **EXACT}[name], name)
    return MODELS[name]


def check(name: str, sizes: dict[str, int]) -> None:
    proto = {**PADDED, **EXACT}[name]
    rng = np.random.default_rng(sum(sizes.values()))
    arrays = {}
    for port in loaded(name).inputs:
        shape = [sizes[d] if isinstance(d, str) else d for d in port.shape or ()]
        arrays[port.name] = rng.standard_normal(shape).astype(port.dtype)
    with np.errstate(all="ignore"):
        (want,) = ReferenceEvaluator(proto).run(None, arrays)
    (got,) = loaded(name).run(arrays)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PADDED)
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 16), columns=st.integers(1, 16))
def test_rounded_sizes_equal_exact_sizes(name: str, rows: int, columns: int) -> None:
    check(name, {"rows": rows, "columns": columns})


@pytest.mark.parametrize("name", PADDED)
def test_sizes_from_five_to_eight_share_a_kernel(name: str) -> None:
    before = len(loaded(name)._kernels)
    for rows in (5, 6, 7, 8):
        check(name, {"rows": rows, "columns": 3 + rows % 2})
    assert len(loaded(name)._kernels) <= before + 1


@pytest.mark.parametrize("name", EXACT)
def test_other_operators_have_exact_sizes(name: str) -> None:
    for rows in (6, 10):
        check(name, {"rows": rows})
    assert len(loaded(name)._kernels) == 2


def test_padded_indices_are_in_range() -> None:
    """A size is rounded up only if the indices in the padding are valid. Padding is filled with
    zeros, which are valid indices; indices that are computed from these zeros may not be.
    """
    for extra, kernels in (([], 1), ([n("Sub", ["x", "one"], ["i"])], 3)):
        name = "i" if extra else "x"
        proto = model([*extra, n("Gather", ["table", name], ["y"])], {"x": ["rows"]}, INT64)
        lookup = from_proto(proto)
        for rows in (5, 6, 7):
            ids = np.arange(rows) % 8 + 1
            (got,) = lookup(ids)
            np.testing.assert_array_equal(got, WEIGHTS["table"][ids - bool(extra)])
        assert len(lookup._kernels) == kernels
        lookup.close()


def test_how_sizes_are_rounded_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a size was used before, its rounded size is looked up; no graph is built to determine it
    again.
    """
    from ark.interop.onnx import model as module

    built = []
    build = module.build
    monkeypatch.setattr(module, "build", lambda *a: built.append(1) or build(*a))
    dense = from_proto(PADDED["layer"], "layer")
    for rows in (5, 6, 5, 6):
        dense(np.ones((rows, 4), np.float32))
    # Each of the two sizes builds two graphs, and the kernel that both sizes share builds one: 2 *
    # 2 + 1. The later calls build none.
    assert len(built) == 5
    dense.close()
