"""Loops, scans, sequences and ONNX's standard functions, compared with onnx's reference
evaluator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper, numpy_helper

import ark
from ark.errors import UnsupportedError
from ark.interop.onnx.model import from_proto
from tests.cases.onnx_forms import BOOL, FLOAT, INT64, n, network, same
from tests.interop.node_suite import run_case, selected
from tests.slow import slow

CASES = (
    "test_scan9_multi_state",
    "test_attention_4d_gqa_causal_nonpad_decode",
    "test_hannwindow_symmetric",
    "test_flexattention_soft_cap",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@slow
@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_node_suite(name: str) -> None:
    (case,) = selected((name,))
    run_case(case)


def info(name: str, kind: int, shape: Any) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def doubling(limit: float | None) -> Any:
    """Returns a loop's body: s becomes 2 s + w, and each iteration outputs s. It ends at iteration
    `limit`.
    """
    nodes = [
        n("Add", ["s", "s"], ["d"]),
        n("Add", ["d", "w"], ["t"]),
        n("Identity", ["t"], ["each"]),
    ]
    weights = []
    if limit is None:
        nodes.append(n("Identity", ["go"], ["on"]))
    else:
        nodes.append(n("Less", ["i", "limit"], ["on"]))
        weights.append(numpy_helper.from_array(np.array(limit, np.int64), "limit"))
    inputs = [info("i", INT64, ()), info("go", BOOL, ()), info("s", FLOAT, (2,))]
    outputs = [info("on", BOOL, ()), info("t", FLOAT, (2,)), info("each", FLOAT, (2,))]
    return helper.make_graph(nodes, "body", inputs, outputs, weights)


@pytest.mark.parametrize(
    ("turns", "limit"), [(3, None), (None, 2), (5, 1)], ids=["count", "end", "both"]
)
def test_loops(turns: int | None, limit: int | None) -> None:
    """Loops with and without a number of iterations and a condition. The body reads w of the graph
    around the loop.
    """
    names = ["m" if turns is not None else "", "yes", "x"]
    loop = n("Loop", names, ["y", "all"], body=doubling(limit))
    weights = {} if turns is None else {"m": np.array(turns, np.int64)}
    proto = network(
        [loop],
        {"x": (FLOAT, (2,)), "w": (FLOAT, (2,))},
        {"y": (FLOAT, (2,)), "all": (FLOAT, ("n", 2))},
        yes=np.array(True),
        **weights,
    )
    same(proto, x=np.array([1, -2], np.float32), w=np.array([0.5, 0.25], np.float32))


def test_loop_count_may_be_an_input() -> None:
    loop = n("Loop", ["m", "yes", "x"], ["y", "all"], body=doubling(None))
    proto = network(
        [loop],
        {"m": (INT64, ()), "x": (FLOAT, (2,)), "w": (FLOAT, (2,))},
        {"y": (FLOAT, (2,)), "all": (FLOAT, ("n", 2))},
        yes=np.array(True),
    )
    for turns in (2, 4):
        same(proto, m=np.array(turns), x=np.ones(2, np.float32), w=np.ones(2, np.float32))
    model = from_proto(proto)
    last, every = model(np.array(0), np.ones(2, np.float32), np.zeros(2, np.float32))
    assert last.tolist() == [1, 1] and every.shape[0] == 0
    with pytest.raises(UnsupportedError, match="a loop of more than 1024 iterations"):
        model(np.array(2000), np.ones(2, np.float32), np.ones(2, np.float32))


@pytest.mark.parametrize("backwards", [0, 1])
def test_scans(backwards: int) -> None:
    """A Scan that computes a running sum along the second axis and stacks its results along the
    last one.
    """
    nodes = [n("Add", ["s", "e"], ["t"]), n("Mul", ["t", "e"], ["o"])]
    body = helper.make_graph(
        nodes,
        "body",
        [info("s", FLOAT, (2,)), info("e", FLOAT, (2,))],
        [info("t", FLOAT, (2,)), info("o", FLOAT, (2,))],
    )
    words = {"scan_input_axes": [1], "scan_output_axes": [1], "num_scan_inputs": 1}
    words |= {
        "scan_input_directions": [backwards],
        "scan_output_directions": [1 - backwards],
    }
    scan = n("Scan", ["z", "x"], ["last", "y"], body=body, **words)
    proto = network(
        [scan],
        {"x": (FLOAT, (2, 4))},
        {"last": (FLOAT, (2,)), "y": (FLOAT, (2, 4))},
        z=np.zeros(2, np.float32),
    )
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    ahead = x[:, ::-1] if backwards else x
    sums = np.cumsum(ahead, 1)
    products = sums * ahead if backwards else (sums * ahead)[:, ::-1]
    model = from_proto(proto)
    last, y = model(x)
    np.testing.assert_array_equal(last, sums[:, -1])
    np.testing.assert_array_equal(y, products)
    model.close()


def test_sequences() -> None:
    nodes = [
        n("SplitToSequence", ["x", "parts"], ["s"], axis=0),
        n("SequenceAt", ["s", "last"], ["e"]),
        n("Mul", ["e", "e"], ["q"]),
        n("SequenceInsert", ["s", "q", "first"], ["t"]),
        n("SequenceErase", ["t", "last"], ["u"]),
        n("SequenceLength", ["u"], ["count"]),
        n("ConcatFromSequence", ["u"], ["y"], axis=0),
        n("SequenceConstruct", ["e", "q"], ["v"]),
        n("ConcatFromSequence", ["v"], ["z"], axis=-1, new_axis=1),
    ]
    proto = network(
        nodes,
        {"x": (FLOAT, (5, 2))},
        {"y": (FLOAT, (5, 2)), "z": (FLOAT, (1, 2, 2)), "count": (INT64, ())},
        parts=np.array(2, np.int64),
        last=np.array(-1, np.int64),
        first=np.array(0, np.int64),
    )
    same(proto, x=np.arange(10, dtype=np.float32).reshape(5, 2))


def branches(then: list[Any], other: list[Any]) -> Any:
    """Returns an If whose condition is computed from x."""
    out = info("o", FLOAT, (2, 2))
    graphs = {
        name: helper.make_graph(nodes, name, [], [out])
        for name, nodes in (("then_branch", then), ("else_branch", other))
    }
    nodes = [
        n("ReduceSum", ["x"], ["s"], keepdims=0),
        n("Less", ["s", "t"], ["c"]),
        n("If", ["c"], ["y"], **graphs),
    ]
    x = {"x": (FLOAT, (2, 2))}
    zero = np.array(0, np.float32)
    return network(nodes, x, {"y": (FLOAT, (2, 2))}, t=zero, i=np.array([1, 0], np.int64))


def test_condition_that_a_run_computes_chooses_between_results() -> None:
    """An If whose condition is computed at run time: one kernel computes both branches and selects.
    If an index of a branch might be out of range, there is a kernel for each value of the
    condition.
    """
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    safe = branches([n("Exp", ["x"], ["o"])], [n("Neg", ["x"], ["o"])])
    model = from_proto(safe)
    np.testing.assert_allclose(model(x)[0], -x)
    np.testing.assert_allclose(model(-x)[0], np.exp(-x), rtol=1e-6)
    assert len(model._kernels) == 1
    model.close()
    checked = branches([n("Gather", ["x", "i"], ["o"])], [n("Neg", ["x"], ["o"])])
    for sign in (1, -1):
        same(checked, x=sign * x)
