"""ONNX types that ark lacks (integers of 2, 4 and 16 bits, uint64, small floats), compared with
NumPy, ml_dtypes and onnx's tests. Quantised operators, compared with NumPy's integers.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

import ark
from ark.errors import UnsupportedError
from ark.interop.onnx.model import from_proto
from tests.cases.onnx_forms import BOOL, FLOAT, n, network
from tests.interop.node_suite import run_case, selected

CASES = (
    "test_castlike_UINT4_to_FLOAT16",
    "test_cast_e8m0_FLOAT_to_FLOAT8E8M0",
    "test_pow_types_float32_uint64",
    "test_top_k_uint64",
    "test_quantizelinear_blocked_asymmetric",
    "test_dequantizelinear_int2",
    "test_qlinearmatmul_3D_int8_float16",
    "test_qlinearconv",
    "test_convinteger_without_padding",
    "test_dynamicquantizelinear",
    "test_bitcast_uint16_to_int16",
)


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


@pytest.mark.parametrize("name", CASES)
def test_cases_of_the_node_suite(name: str) -> None:
    (case,) = selected((name,))
    run_case(case)


PAIRS = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Max": np.maximum,
    "Min": np.minimum,
    "Less": np.less,
    "GreaterOrEqual": np.greater_equal,
    "Equal": np.equal,
    "BitwiseXor": np.bitwise_xor,
    "BitwiseAnd": np.bitwise_and,
}


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.uint64])
def test_integers_of_other_widths(dtype: Any) -> None:
    """Integers of 2, 4 and 16 bits and uint64: arithmetic wraps, and comparisons, division and
    shifts follow the type.
    """
    kind, limits = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), np.iinfo(dtype)
    edges = np.array([limits.min, 0, 1, 2, 3, limits.max // 2, limits.max // 2 + 1, limits.max])
    rng = np.random.default_rng(5)
    rest = rng.integers(limits.min, limits.max, 56, dtype, endpoint=True)
    a = np.concatenate([np.repeat(edges.astype(dtype), 8), rest])
    b = np.concatenate([np.tile(edges.astype(dtype), 8), rest[::-1]])
    nodes = [n(op, ["a", "b"], [op]) for op in PAIRS]
    outputs = {op: (BOOL if op[0] in "LGE" else kind, a.shape) for op in PAIRS}
    want = {op: function(a, b) for op, function in PAIRS.items()}
    if limits.min == 0:
        c = np.maximum(b, 1)
        bits = limits.bits
        nodes += [
            n("Max", ["b", "one"], ["c"]),
            n("Div", ["a", "c"], ["Div"]),
            n("Mod", ["a", "c"], ["Mod"]),
            n("Mod", ["b", "bits"], ["s"]),
            n("BitShift", ["a", "s"], ["left"], direction="LEFT"),
            n("BitShift", ["a", "s"], ["right"], direction="RIGHT"),
        ]
        shift = b % dtype(bits)
        want |= {"Div": a // c, "Mod": a % c, "left": a << shift, "right": a >> shift}
        outputs |= dict.fromkeys(("Div", "Mod", "left", "right"), (kind, a.shape))
    nodes.append(n("Cast", ["a"], ["float"], to=FLOAT))
    outputs["float"], want["float"] = (FLOAT, a.shape), a.astype(np.float32)
    proto = network(
        nodes,
        {"a": (kind, a.shape), "b": (kind, a.shape)},
        outputs,
        21,
        one=np.array(1, dtype),
        bits=np.array(limits.bits, dtype),
    )
    model = from_proto(proto)
    for name, got in zip(outputs, model(a, b), strict=True):
        assert got.dtype == want[name].dtype, name
        np.testing.assert_array_equal(got, want[name], name)
    model.close()


SMALL = ("float4_e2m1fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4", "uint4", "int2", "uint2")


@pytest.mark.parametrize("name", SMALL)
def test_casts_to_small_types_round_as_ml_dtypes_does(name: str) -> None:
    """Casts to small types round as in ml_dtypes: every value of the type, values between them and
    their midpoints; also casts back.
    """
    dtype = np.dtype(getattr(ml_dtypes, name))
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    whole = name.startswith(("int", "uint"))
    values = (
        np.arange(-20, 21)
        if whole
        else np.unique(
            np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float32)
        )
    )
    values = values[np.isfinite(values)].astype(np.float32)
    most = 15.0 if whole else float(ml_dtypes.finfo(dtype).max)
    values = values[np.abs(values) <= most]
    between = [values[:-1] + (values[1:] - values[:-1]) * np.float32(s) for s in (0.25, 0.5, 0.8)]
    x = np.concatenate([values, *between]).astype(np.float32)
    nodes = [n("Cast", ["x"], ["y"], to=kind), n("Cast", ["y"], ["z"], to=FLOAT)]
    outputs = {"y": (kind, x.shape), "z": (FLOAT, x.shape)}
    proto = network(nodes, {"x": (FLOAT, x.shape)}, outputs, 25)
    proto.ir_version = 13
    model = from_proto(proto)
    y, z = model(x)
    assert y.dtype == dtype
    np.testing.assert_array_equal(z, x.astype(dtype).astype(np.float32))
    np.testing.assert_array_equal(y.astype(np.float32), z)
    model.close()


def test_operator_that_does_not_take_a_type_says_so() -> None:
    proto = network(
        [n("Cast", ["x"], ["s"], to=TensorProto.UINT64), n("ArgMax", ["s"], ["y"])],
        {"x": (FLOAT, (4,))},
        {"y": (TensorProto.INT64, (1,))},
    )
    with pytest.raises(UnsupportedError, match=r"ArgMax \(node number 1\): ArgMax of uint64"):
        from_proto(proto)


@pytest.mark.parametrize("depth", [5, 700])
def test_products_of_integers_are_exact(depth: int) -> None:
    """Quantised products are exact. If both operands have zero points, sums exceed the integers
    that fp32 represents exactly.
    """
    rng = np.random.default_rng(7)
    a = rng.integers(0, 256, (3, depth), np.uint8)
    b = rng.integers(-128, 128, (depth, 4), np.int8)
    a[0], b[:, 0] = 255, 127
    proto = network(
        [n("MatMulInteger", ["a", "b", "p", "q"], ["y"])],
        {"a": (TensorProto.UINT8, a.shape), "b": (TensorProto.INT8, b.shape)},
        {"y": (TensorProto.INT32, (3, 4))},
        p=np.array(1, np.uint8),
        q=np.array([-128, 0, 3, 5], np.int8),
    )
    want = (a.astype(np.int64) - 1) @ (b.astype(np.int64) - np.array([-128, 0, 3, 5]))
    np.testing.assert_array_equal(from_proto(proto)(a, b)[0], want)


def test_loop_keeps_each_type_of_its_state() -> None:
    """A loop whose state is an int16, which overflows, and a float keeps both types."""
    kind, info = TensorProto.INT16, helper.make_tensor_value_info
    body = helper.make_graph(
        [n("Mul", ["s", "s"], ["t"]), n("Add", ["f", "f"], ["g"]), n("Identity", ["go"], ["on"])],
        "body",
        [
            info("i", TensorProto.INT64, ()),
            info("go", BOOL, ()),
            info("f", FLOAT, (2,)),
            info("s", kind, (2,)),
        ],
        [info("on", BOOL, ()), info("g", FLOAT, (2,)), info("t", kind, (2,))],
    )
    proto = network(
        [n("Loop", ["turns", "", "f", "s"], ["y", "z"], body=body)],
        {"f": (FLOAT, (2,)), "s": (kind, (2,))},
        {"y": (FLOAT, (2,)), "z": (kind, (2,))},
        turns=np.array(2),
    )
    y, z = from_proto(proto)(np.array([0.375, -1], np.float32), np.array([-21, 3], np.int16))
    np.testing.assert_array_equal(y, np.array([1.5, -4], np.float32))
    np.testing.assert_array_equal(z, np.array([-21, 3], np.int16) ** 4)
