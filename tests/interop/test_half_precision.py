"""Functions of 16-bit values whose intermediates overflow fp16: results are finite where torch's
are, and as near to float64 as torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx.helper as oh
import pytest
import torch
from torch.nn import functional as nn

import ark
from ark.interop.onnx.model import from_proto


@pytest.fixture(autouse=True)
def on_the_cpu() -> None:
    ark.init(backend="cpu")


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "std": lambda x: x.std(1),
    "var of small values": lambda x: (x / 64).var(2),
    "layer_norm": lambda x: nn.layer_norm(x, (4, 8)),
    "rms_norm": lambda x: nn.rms_norm(x, (8,)),
    "batch_norm in training": lambda x: nn.batch_norm(x, None, None, training=True),
    "attention": lambda x: nn.scaled_dot_product_attention(x[None], x[None], x[None]),
    "causal attention": lambda x: nn.scaled_dot_product_attention(x, x, x, is_causal=True),
    "norm": lambda x: x.norm(dim=2),
    "logsumexp": lambda x: x.logsumexp(2),
}


def _large(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 300).half()


def _distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    scale = exact.abs() + 0.01 * exact.abs().max()
    return float(((result.double() - exact).abs() / scale).max())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fp16_of_large_values_is_as_near_as_torchs(name: str) -> None:
    torch._dynamo.reset()
    function, x = FUNCTIONS[name], _large(6, 4, 8)
    exact = function(x.double())
    result = torch.compile(function, backend="ark")(x)
    assert _distance(result, exact) <= max(4 * _distance(function(x), exact), 2e-3)


@pytest.mark.parametrize("name", ["std", "layer_norm", "rms_norm"])
def test_gradient_of_fp16_of_large_values_is_as_near_as_torchs(name: str) -> None:
    torch._dynamo.reset()
    function, x = FUNCTIONS[name], _large(6, 4, 8)
    slopes = torch.linspace(0.5, 1.0, function(x).numel(), dtype=torch.float64)

    def gradient(call: Callable[[Any], Any], at: torch.Tensor) -> torch.Tensor:
        at = at.clone().requires_grad_(True)
        result = call(at)
        (result.float() * slopes.reshape(result.shape).float()).sum().backward()
        assert at.grad is not None
        return at.grad

    exact = gradient(function, x.double())
    result = gradient(torch.compile(function, backend="ark"), x)
    assert _distance(result, exact) <= max(4 * _distance(gradient(function, x), exact), 4e-3)


def _root_of_squares(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).sum((2, 3), keepdims=True))


def _across_channels(x: np.ndarray) -> np.ndarray:
    padded = np.pad(x**2, [(0, 0), (1, 1), (0, 0), (0, 0)])
    sums = padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]
    return x / (1 + 1e-4 / 3 * sums) ** 0.75


OPERATORS: dict[str, tuple[dict[str, Any], Callable[[np.ndarray], np.ndarray]]] = {
    "ReduceL2": ({"axes": [2, 3]}, _root_of_squares),
    "ReduceLogSum": (
        {"axes": [2, 3]},
        lambda x: np.log(x.sum((2, 3), keepdims=True)),
    ),
    "GlobalLpPool": ({}, _root_of_squares),
    "LpPool": ({"kernel_shape": [4, 5]}, _root_of_squares),
    "LpNormalization": ({"axis": 3}, lambda x: x / np.sqrt((x**2).sum(3, keepdims=True))),
    "LRN": ({"size": 3}, _across_channels),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_onnx_operators_of_large_fp16_values_are_finite(name: str) -> None:
    attributes, exact = OPERATORS[name]
    x = np.abs(_large(2, 3, 4, 5).numpy()) * (16 if name == "ReduceLogSum" else 1)
    of = onnx.TensorProto.FLOAT16
    graph = oh.make_graph(
        [oh.make_node(name, ["x"], ["y"], **attributes)],
        "g",
        [oh.make_tensor_value_info("x", of, list(x.shape))],
        [oh.make_tensor_value_info("y", of, [None] * 4)],
    )
    model = oh.make_model(graph, opset_imports=[oh.make_opsetid("", 17)], ir_version=8)
    (result,) = from_proto(model)(x)
    np.testing.assert_allclose(result, exact(x.astype(np.float64)), rtol=2e-3)


def test_matmul_of_fp16_keeps_sums_in_fp32() -> None:
    x = _large(5, 40)
    result = ark.matmul(x, x, transpose_other=True, dtype=ark.fp32).eval()
    torch.testing.assert_close(result, x.float() @ x.float().T)
    with pytest.raises(ark.ModelError, match="use ark"):
        ark.matmul(x, x, transpose_other=True, dtype=ark.bf16)
