"""Exponential, roots and activations, elementwise."""

from __future__ import annotations

from ark.frontend.tensor import Output, Tensor, TensorLike
from ark.ops.elementwise import unary


def exp(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """e^input, elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.exp(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([0.3679, 1.0000, 7.3891])
    """
    return unary("exp", input, output, name)


def sqrt(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """The square root of each element; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.sqrt(torch.tensor([1.0, 2.0, 4.0])).eval()
        tensor([1.0000, 1.4142, 2.0000])
    """
    return unary("sqrt", input, output, name)


def rsqrt(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """1 / sqrt(input), elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.rsqrt(torch.tensor([1.0, 2.0, 4.0])).eval()
        tensor([1.0000, 0.7071, 0.5000])
    """
    return unary("rsqrt", input, output, name)


def relu(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """max(input, 0), elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.relu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([0., 0., 2.])
    """
    return unary("relu", input, output, name)


def gelu(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """GELU in its tanh approximation (Hendrycks and Gimpel 2016), elementwise; any shape.

    Types: fp32, fp16, bf16.

    Examples:
        >>> ark.gelu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.1588,  0.0000,  1.9546])
    """
    return unary("gelu", input, output, name)


def sigmoid(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """1 / (1 + exp(-input)), elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.sigmoid(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([0.2689, 0.5000, 0.8808])
    """
    return unary("sigmoid", input, output, name)


def silu(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """input * sigmoid(input), elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.silu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.2689,  0.0000,  1.7616])
    """
    return unary("silu", input, output, name)
