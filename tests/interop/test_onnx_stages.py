"""ONNX files with tensor sizes that depend on values computed at run time. They run as several
kernels (stages), between which the host computes sizes, compared with onnx's reference evaluator.
Also recurrent layers with attributes other than the defaults.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ark
from ark.errors import UnsupportedError
from ark.interop.onnx.host import _suppressed
from ark.interop.onnx.model import from_proto
from tests.cases.onnx_forms import BOOL, FLOAT, INT64, n, network
from tests.interop.node_suite import run_case, selected


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@pytest.mark.parametrize("name", ["test_unique_sorted_with_axis_3d", "test_lstm_with_peepholes"])
def test_cases_of_the_node_suite(name: str) -> None:
    (case,) = selected((name,))
    run_case(case)


def equal(proto: onnx.ModelProto, *inputs: dict[str, Any]) -> Any:
    """Runs one model on several inputs and compares it. Returns the model."""
    model = from_proto(proto)
    for arrays in inputs:
        wanted = ReferenceEvaluator(proto).run(None, arrays)
        for got, want in zip(model.run(arrays), wanted, strict=True):
            assert got.dtype == want.dtype and got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    return model


def test_computed_size_begins_a_new_stage() -> None:
    """Rows are selected by their sums, which an earlier stage computes. Both kernels write outputs
    of the model.
    """
    nodes = [
        n("Exp", ["x"], ["e"]),
        n("ReduceSum", ["e", "axis"], ["s"], keepdims=0),
        n("Greater", ["s", "least"], ["g"]),
        n("NonZero", ["g"], ["i"]),
        n("Squeeze", ["i", "zero"], ["j"]),
        n("Gather", ["e", "j"], ["r"]),
        n("MatMul", ["r", "w"], ["y"]),
    ]
    proto = network(
        nodes,
        {"x": (FLOAT, ("rows", 3))},
        {"y": (FLOAT, ("some", 2)), "s": (FLOAT, ("rows",))},
        axis=np.array([1]),
        zero=np.array([0]),
        least=np.array(3.5, np.float32),
        w=np.arange(6, dtype=np.float32).reshape(3, 2),
    )
    rng = np.random.default_rng(1)
    some = [{"x": rng.standard_normal((rows, 3)).astype(np.float32)} for rows in (5, 8, 5)]
    model = equal(proto, *some, {"x": np.full((2, 3), -9, np.float32)})
    model.close()


def test_computed_shape_determines_the_following_kernels() -> None:
    """The number of repetitions of the elements is a sum of floats, which an earlier stage
    computes.
    """
    nodes = [
        n("ReduceSum", ["x"], ["s"], keepdims=0),
        n("Cast", ["s"], ["c"], to=INT64),
        n("Unsqueeze", ["c", "zero"], ["u"]),
        n("Concat", ["u", "three"], ["shape"], axis=0),
        n("Mul", ["x", "x"], ["q"]),
        n("ReduceMax", ["q"], ["m"], keepdims=0),
        n("Expand", ["m", "shape"], ["y"]),
    ]
    proto = network(
        nodes,
        {"x": (FLOAT, (20,))},
        {"y": (FLOAT, ("n", 3))},
        zero=np.array([0]),
        three=np.array([3]),
    )
    two, four = np.zeros(20, np.float32), np.full(20, 0.2, np.float32)
    two[3] = 2.0
    equal(proto, {"x": two}, {"x": four}).close()


def info(name: str, kind: int, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def test_loop_ends_by_a_computed_condition() -> None:
    """A loop doubles s and adds v until the sum of s is large. v is computed before the loop."""
    body = helper.make_graph(
        [
            n("Add", ["s", "s"], ["d"]),
            n("Add", ["d", "v"], ["t"]),
            n("ReduceSum", ["t"], ["sum"], keepdims=0),
            n("Less", ["sum", "most"], ["on"]),
            n("Identity", ["t"], ["each"]),
        ],
        "body",
        [info("i", INT64, ()), info("go", BOOL, ()), info("s", FLOAT, (2,))],
        [info("on", BOOL, ()), info("t", FLOAT, (2,)), info("each", FLOAT, (2,))],
        [numpy_helper.from_array(np.array(40, np.float32), "most")],
    )
    nodes = [
        n("Exp", ["w"], ["v"]),
        n("Loop", ["", "yes", "x"], ["y", "all"], body=body),
        n("Mul", ["all", "v"], ["z"]),
    ]
    proto = network(
        nodes,
        {"x": (FLOAT, (2,)), "w": (FLOAT, (2,))},
        {"y": (FLOAT, (2,)), "z": (FLOAT, ("turns", 2))},
        yes=np.array(True),
    )
    w = np.array([0.5, 0.0], np.float32)
    small, large = np.array([0.5, 1], np.float32), np.array([9, 12], np.float32)
    equal(proto, {"x": small, "w": w}, {"x": large, "w": w}).close()


def test_branch_whose_results_have_sizes_of_their_own() -> None:
    """An If whose condition is computed, and one of whose branches has a result of
    computed size.
    """
    shape = info("o", INT64, (1, "n"))
    then = helper.make_graph([n("NonZero", ["e"], ["o"])], "then", [], [shape])
    other = helper.make_graph([n("Identity", ["k"], ["o"])], "else", [], [shape])
    nodes = [
        n("Relu", ["x"], ["e"]),
        n("ReduceSum", ["e"], ["s"], keepdims=0),
        n("Greater", ["s", "one"], ["c"]),
        n("If", ["c"], ["i"], then_branch=then, else_branch=other),
        n("Add", ["i", "i"], ["y"]),
    ]
    proto = network(
        nodes,
        {"x": (FLOAT, (12,))},
        {"y": (INT64, (1, "n"))},
        one=np.array(1, np.float32),
        k=np.array([[7]]),
    )
    x = np.linspace(-1, 1, 12, dtype=np.float32)
    equal(proto, {"x": x}, {"x": -np.abs(x)}, {"x": x * x}).close()


def test_suppression_equals_the_reference() -> None:
    """Non-maximum suppression equals the reference: boxes with corners in any order, equal scores,
    and boxes without area.
    """
    rng = np.random.default_rng(3)
    for centred in (0, 1):
        boxes = rng.uniform(0, 1, (2, 40, 4)).astype(np.float32)
        boxes[0, 5, 2:] = boxes[0, 5, :2] if not centred else 0
        scores = rng.integers(0, 20, (2, 3, 40)).astype(np.float32)
        inputs = [
            boxes,
            scores,
            np.array([6], np.int64),
            np.array([0.3], np.float32),
            np.array([4.0], np.float32),
        ]
        names = list("abcde")
        graph = helper.make_graph(
            [n("NonMaxSuppression", names, ["y"], center_point_box=centred)],
            "g",
            [helper.make_empty_tensor_value_info(name) for name in names],
            [helper.make_empty_tensor_value_info("y")],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)])
        (want,) = ReferenceEvaluator(proto).run(None, dict(zip(names, inputs, strict=True)))
        got = _suppressed(list(inputs), {"center_point_box": centred})
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", ["GRU", "LSTM", "RNN"])
def test_lengths_by_sequence_equal_torch(op: str) -> None:
    torch.manual_seed(5)
    layer = getattr(torch.nn, op)(3, 4, bidirectional=True)
    x, lengths = torch.randn(6, 3, 3), torch.tensor([6, 2, 4])
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    with torch.no_grad():
        out, state = layer(packed)
        want, _ = torch.nn.utils.rnn.pad_packed_sequence(out, total_length=6)
    order = {"GRU": [1, 0, 2], "LSTM": [0, 3, 1, 2], "RNN": [0]}[op]  # from torch's gates to ONNX's

    def gates(name: str) -> np.ndarray:
        parts = [
            np.split(getattr(layer, f"{name}_l0{d}").detach().numpy(), len(order))
            for d in ("", "_reverse")
        ]
        return np.stack([np.concatenate([p[i] for i in order]) for p in parts])

    words = {"linear_before_reset": 1} if op == "GRU" else {}
    node = n(
        op,
        ["x", "w", "r", "b", "lengths"],
        ["y", "h"],
        hidden_size=4,
        direction="bidirectional",
        **words,
    )
    proto = network(
        [node],
        {"x": (FLOAT, (6, 3, 3)), "lengths": (onnx.TensorProto.INT32, (3,))},
        {"y": (FLOAT, (6, 2, 3, 4)), "h": (FLOAT, (2, 3, 4))},
        w=gates("weight_ih"),
        r=gates("weight_hh"),
        b=np.concatenate([gates("bias_ih"), gates("bias_hh")], 1),
    )
    model = from_proto(proto)
    y, h = model(x.numpy(), lengths.numpy().astype(np.int32))
    wanted = want.numpy().reshape(6, 3, 2, 4).transpose(0, 2, 1, 3)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)
    last = state[0] if op == "LSTM" else state
    np.testing.assert_allclose(h, last.numpy(), rtol=1e-5, atol=1e-6)
    model.close()


def test_clips_and_other_activations_of_recurrent_layers() -> None:
    rng = np.random.default_rng(7)
    x, w, r = (rng.standard_normal(s).astype(np.float32) for s in ((3, 2, 4), (1, 5, 4), (1, 5, 5)))
    node = n("RNN", ["x", "w", "r"], ["y"], hidden_size=5, activations=["Relu"], clip=0.75)
    proto = network([node], {"x": (FLOAT, x.shape)}, {"y": (FLOAT, (3, 1, 2, 5))}, w=w, r=r)
    h, want = np.zeros((2, 5), np.float32), []
    for step in x:
        h = np.maximum(np.clip(step @ w[0].T + h @ r[0].T, -0.75, 0.75), 0)
        want.append(h)
    model = from_proto(proto)
    np.testing.assert_allclose(model(x)[0][:, 0], np.stack(want), rtol=1e-5, atol=1e-6)
    model.close()
    odd = n("RNN", ["x", "w", "r"], ["y"], hidden_size=5, activations=["Affine"])
    with pytest.raises(UnsupportedError, match="Affine"):
        from_proto(network([odd], {"x": (FLOAT, x.shape)}, {"y": (FLOAT, (3, 1, 2, 5))}, w=w, r=r))
