"""Rarely used features of ONNX files, compared with onnx's reference evaluator and NumPy: old
opsets, branches, defaults, unknown sizes, empty tensors, float64, Resize and Einsum.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import ark
from ark.errors import BaseError, UnsupportedError
from ark.interop.onnx.model import from_proto
from tests.cases.onnx_forms import BOOL, DOUBLE, FLOAT, INT64, n, network, same
from tests.interop.node_suite import run_case, selected

CASES = (
    "test_cast_FLOAT_to_FLOAT16",
    "test_castlike_FLOAT_to_FLOAT8E4M3FN",
    "test_bitshift_right_uint8",
    "test_mod_mixed_sign_float32",
    "test_spacetodepth_crd_mode_example",
    "test_einsum_batch_diagonal",
    "test_einsum_batch_matmul",
    "test_reversesequence_time",
    "test_quantizelinear_axis",
    "test_dequantizelinear_axis",
    "test_nllloss_NCd1d2_with_weight_reduction_mean",
    "test_nllloss_NCd1_mean_weight_negative_ii",
    "test_resize_tf_crop_and_resize",
    "test_resize_downsample_scales_cubic_antialias",
    "test_resize_upsample_sizes_nearest_not_larger",
    "test_affine_grid_2d",
    "test_upsample_nearest",
    "test_reduce_max_empty_set",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@pytest.mark.parametrize(
    "name",
    CASES,
)
def test_cases_of_the_node_suite(name: str) -> None:
    (case,) = selected((name,))
    run_case(case)


ROUNDS = ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"]
PLACES = ["half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "asymmetric", "align_corners"]


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("sizes", [(7, 3), (2, 9), (1, 4)])
def test_resize_to_nearest(places: str, sizes: tuple[int, int]) -> None:
    """Resize to the nearest element in all rounding modes, in one graph."""
    nodes = [
        n(
            "Resize",
            ["x", "", "", "to"],
            [how],
            coordinate_transformation_mode=places,
            nearest_mode=how,
        )
        for how in ROUNDS
    ]
    shape = (1, 2, *sizes)
    proto = network(
        nodes,
        {"x": (FLOAT, (1, 2, 4, 5))},
        dict.fromkeys(ROUNDS, (FLOAT, shape)),
        to=np.array(shape, np.int64),
    )
    same(proto, x=np.arange(40, dtype=np.float32).reshape(1, 2, 4, 5))


def test_older_opsets_are_converted() -> None:
    x = np.random.default_rng(1).standard_normal((2, 3)).astype(np.float32)
    for opset in (7, 9, 11, 12):
        nodes = [
            n("Unsqueeze", ["x"], ["u"], axes=[1]),
            n("ReduceSum", ["u"], ["s"], axes=[2], keepdims=1),
            n("Softmax", ["u"], ["p"], axis=1),
            n("Add", ["s", "p"], ["y"]),
        ]
        proto = network(nodes, {"x": (FLOAT, (2, 3))}, {"y": (FLOAT, (2, 1, 3))}, opset)
        model = from_proto(proto)
        e = np.exp(x - x.max(1, keepdims=True))
        want = (x.sum(1, keepdims=True) + e / e.sum(1, keepdims=True))[:, None]
        np.testing.assert_allclose(model(x)[0], want, rtol=1e-5, atol=1e-6)
        model.close()
    added = [n("Add", ["x", "b"], ["s"], broadcast=1, axis=0), n("Relu", ["s"], ["y"])]
    b = np.array([1, -1], np.float32)
    proto = network(added, {"x": (FLOAT, (2, 3))}, {"y": (FLOAT, (2, 3))}, 6, b=b)
    proto.graph.input.append(helper.make_tensor_value_info("b", FLOAT, (2,)))
    model = from_proto(proto)
    np.testing.assert_array_equal(model(x)[0], np.maximum(x + b[:, None], 0))
    model.close()
    turn = helper.make_graph([n("Relu", ["e"], ["o"])], "g", [], [])
    turn.input.append(helper.make_tensor_value_info("e", FLOAT, (3,)))
    turn.output.append(helper.make_tensor_value_info("o", FLOAT, (3,)))
    scan = [n("Scan", ["", "x"], ["y"], body=turn, num_scan_inputs=1)]
    with pytest.raises(UnsupportedError, match="opset 8, which onnx's version converter cannot"):
        from_proto(network(scan, {"x": (FLOAT, (1, 2, 3))}, {"y": (FLOAT, (1, 2, 3))}, 8))


def choice(condition: list[Any], inputs: dict[str, Any], **weights: Any) -> onnx.ModelProto:
    """Returns a model of y = x + 1 if the condition c holds, otherwise a product with the branch's
    own weight.
    """
    out = helper.make_tensor_value_info("o", FLOAT, (2, 2))
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    weight = numpy_helper.from_array(np.full((2, 2), 2, np.float32), "w")
    then = helper.make_graph([n("Add", ["x", "one"], ["o"])], "then", [], [out], [one])
    other = helper.make_graph([n("MatMul", ["x", "w"], ["o"])], "else", [], [out], [weight])
    branch = n("If", ["c"], ["y"], then_branch=then, else_branch=other)
    x = {"x": (FLOAT, (2, 2))}
    return network([*condition, branch], {**x, **inputs}, {"y": (FLOAT, (2, 2))}, **weights)


def test_branches() -> None:
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    for value in (True, False):
        same(choice([], {}, c=np.array(value)), x=x)
        same(choice([], {"c": (BOOL, ())}), x=x, c=np.array(value))
    sized = [
        n("Shape", ["x"], ["s"]),
        n("Gather", ["s", "zero"], ["r"]),
        n("Less", ["r", "t"], ["c"]),
    ]
    for most in (2, 3):
        same(choice(sized, {}, zero=np.array(0), t=np.array(most)), x=x)
    computed = [n("ReduceSum", ["x"], ["s"], keepdims=0), n("Less", ["s", "t"], ["c"])]
    for sign in (1, -1):  # the condition's inputs are part of the kernel's key
        same(choice(computed, {}, t=np.array(0, np.float32)), x=sign * x)


def test_branch_that_is_not_taken_may_hold_anything() -> None:
    out = helper.make_tensor_value_info("o", INT64, (2, "n"))
    nodes = [n("RandomNormalLike", ["x"], ["r"]), n("NonZero", ["r"], ["o"])]
    other = helper.make_graph(nodes, "else", [], [out])
    shape = helper.make_tensor_value_info("o", INT64, (2, 2))
    then = helper.make_graph([n("Cast", ["x"], ["o"], to=INT64)], "then", [], [shape])
    branch = n("If", ["c"], ["y"], name="choice", then_branch=then, else_branch=other)

    def network_with(value: bool) -> onnx.ModelProto:
        return network(
            [branch], {"x": (FLOAT, (2, 2))}, {"y": (INT64, ("a", "b"))}, c=np.array(value)
        )

    np.testing.assert_array_equal(from_proto(network_with(True))(np.ones((2, 2), np.float32))[0], 1)
    with pytest.raises(UnsupportedError, match="RandomNormalLike"):
        from_proto(network_with(False))


def test_defaults_of_inputs_may_be_overridden() -> None:
    proto = network(
        [n("MatMul", ["x", "w"], ["y"])],
        {"x": (FLOAT, (2, 2)), "w": (FLOAT, (2, 2))},
        {"y": (FLOAT, (2, 2))},
        w=np.eye(2, dtype=np.float32),
    )
    model, x = from_proto(proto), np.arange(4, dtype=np.float32).reshape(2, 2)
    w = np.array([[1, 2], [3, 4]], np.float32)
    np.testing.assert_array_equal(model(x)[0], x)
    np.testing.assert_array_equal(model(x, w=w)[0], x @ w)
    np.testing.assert_array_equal(model(x)[0], x)
    with pytest.raises(BaseError, match="w: float32"):
        model(x, w=w[:1])
    model.close()


@pytest.mark.parametrize("size", [-1, 0])
def test_sizes_below_one_are_unknown(size: int) -> None:
    proto = network([n("Relu", ["x"], ["y"])], {"x": (FLOAT, (size, 2))}, {"y": (FLOAT, (size, 2))})
    for rows in (3, 1):
        same(proto, x=np.linspace(-1, 1, rows * 2, dtype=np.float32).reshape(rows, 2))


def test_tensors_without_elements() -> None:
    nodes = [n("MatMul", ["x", "w"], ["m"]), n("Concat", ["m", "z"], ["y"], axis=0)]
    proto = network(
        nodes,
        {"x": (FLOAT, ("rows", 2)), "z": (FLOAT, (1, 3))},
        {"y": (FLOAT, ("all", 3)), "m": (FLOAT, ("rows", 3))},
        w=np.ones((2, 3), np.float32),
    )
    for rows in (0, 2):
        same(proto, x=np.ones((rows, 2), np.float32), z=np.zeros((1, 3), np.float32))


def test_float64_is_computed_in_fp32_with_a_warning() -> None:
    from ark.interop.onnx import values

    values._warn_of_float64.cache_clear()
    proto = network(
        [n("Mul", ["x", "half"], ["y"])],
        {"x": (DOUBLE, (3,))},
        {"y": (DOUBLE, (3,))},
        half=np.array(0.5),
    )
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        same(proto, x=np.array([1.0, -2.5, 1e30]))
    assert [str(w.message) for w in warned if "float64" in str(w.message)] == [
        "float64 tensors of ONNX models are computed in float32, because ark has no 64-bit "
        "floating-point type"
    ]
    model = from_proto(proto)
    with pytest.raises(UnsupportedError, match="float32 cannot represent"):
        model(np.array([1e300, 0.0, 0.0]))
    model.close()


EQUATIONS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)),
    ("...i,...i->...", (2, 3, 4), (2, 3, 4)),
    ("ij,kl->jl", (2, 3), (4, 5)),
    ("bhqd,bhkd->bhqk", (1, 2, 3, 4), (1, 2, 5, 4)),
    ("i,i", (4,), (4,)),
    ("ii,ij->j", (3, 3), (3, 2)),
    ("ba,ab->ab", (2, 3), (3, 2)),
    ("ij,j->i", (2, 3), (1,)),
]


@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_einsum(equation: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s).astype(np.float32) for s in (left, right))
    want = np.einsum(equation, a, b)
    proto = network(
        [n("Einsum", ["a", "b"], ["y"], equation=equation)],
        {"a": (FLOAT, left), "b": (FLOAT, right)},
        {"y": (FLOAT, want.shape)},
    )
    same(proto, a=a, b=b)


def test_number_cast_like_an_input_is_known() -> None:
    """CastLike of a constant needs only the type of the input that it follows, so its result is
    computed while the graph is built. So one kernel serves all inputs.
    """
    nodes = [n("CastLike", ["low", "x"], ["v"]), n("Pad", ["x", "pads", "v"], ["y"])]
    proto = network(
        nodes,
        {"x": (FLOAT, (30, 3))},
        {"y": (FLOAT, (31, 3))},
        low=np.array(-7, np.int64),
        pads=np.array([1, 0, 0, 0]),
    )
    model = from_proto(proto)
    for seed in range(2):
        x = np.random.default_rng(seed).standard_normal((30, 3)).astype(np.float32)
        want = np.concatenate([np.full((1, 3), -7, np.float32), x])
        np.testing.assert_array_equal(model(x)[0], want)
    assert len(model._kernels) == 1
    model.close()
