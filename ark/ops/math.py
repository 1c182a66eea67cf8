"""Elementwise functions of one tensor: roots, logarithms, rounding, trigonometry, activations.

The functions themselves are in ark.tasks.functions. Activations made of several are one node whose
expression is composed here, so that they cost one read and one write.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ark.frontend.tensor import NullTensor, Tensor, as_tensor
from ark.ir.dtype import bool_
from ark.ops.base import float_dtype, result
from ark.ops.elementwise import composed, unary
from ark.tasks.expression import Tree, leaf, number

X = leaf(0)


def _op(name: str, meaning: str, integers: bool = False, predicate: bool = False) -> Any:
    """The user's function of an entry of ark.tasks.functions."""

    def apply(input: Any, output: Any = NullTensor, label: str = "") -> Tensor:
        return unary(name, input, output, label, integers, bool_ if predicate else None)

    def op(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
        return apply(input, output, name)

    types = "fp32, fp16, bf16, integers" if integers else "fp32, fp16, bf16"
    op.__doc__ = f"{meaning}, elementwise; any shape; {types}{', to bool' if predicate else ''}."
    op.__name__ = op.__qualname__ = name
    return op


ln = _op("log", "Natural logarithm")
expm1 = _op("expm1", "e^input - 1, exact where input is small")
log1p = _op("log1p", "Natural logarithm of 1 + input, exact where input is small")
reciprocal = _op("reciprocal", "1 / input")
neg = _op("neg", "-input; integers wrap", integers=True)
abs = _op("abs", "Magnitude; the least integer stays itself", integers=True)
sign = _op("sign", "-1, 0 or 1", integers=True)
floor = _op("floor", "Largest whole number that is not larger", integers=True)
ceil = _op("ceil", "Smallest whole number that is not smaller", integers=True)
round = _op("round", "Nearest whole number, of two the even one", integers=True)
tanh = _op("tanh", "Hyperbolic tangent")
erf = _op("erf", "Gauss error function (Abramowitz and Stegun 1964, 7.1.26)")
sin = _op("sin", "Sine of radians")
cos = _op("cos", "Cosine of radians")
tan = _op("tan", "Tangent of radians")
asin = _op("asin", "Inverse sine, in radians")
acos = _op("acos", "Inverse cosine, in radians")
atan = _op("atan", "Inverse tangent, in radians")
sinh = _op("sinh", "Hyperbolic sine")
cosh = _op("cosh", "Hyperbolic cosine")
asinh = _op("asinh", "Inverse hyperbolic sine")
acosh = _op("acosh", "Inverse hyperbolic cosine")
atanh = _op("atanh", "Inverse hyperbolic tangent")
isnan = _op("isnan", "Is it no number?", predicate=True)
isinf = _op("isinf", "Is it infinite?", predicate=True)


def activation(name: str, input: Any, output: Any, label: str, tree: Tree) -> Tensor:
    """A node whose expression over one floating-point tensor is `tree`."""
    tensor = as_tensor(input)
    dtype = float_dtype(name, tensor)
    return result(name, [tensor], tensor.ir.shape, dtype, output, {"expr": tree}, label)


def _positive(tree: Tree) -> Tree:
    return ["greater", tree, number(0.0)]


def leaky_relu(input: Any, slope: float = 0.01, output: Any = NullTensor, name: str = "") -> Tensor:
    """input where it is positive, else slope * input; any shape; fp32, fp16, bf16."""
    tree = ["where", _positive(X), X, ["mul", X, number(float(slope))]]
    return activation("leaky_relu", input, output, name, tree)


def elu(input: Any, alpha: float = 1.0, output: Any = NullTensor, name: str = "") -> Tensor:
    """input where it is positive, else alpha (e^input - 1) (Clevert et al. 2015);
    any shape; fp32, fp16, bf16.
    """
    return activation("elu", input, output, name, _elu(float(alpha), 1.0))


def _elu(alpha: float, gamma: float) -> Tree:
    below = ["expm1", ["minimum", X, number(0.0)]]
    made = ["where", _positive(X), X, ["mul", below, number(alpha)]]
    return made if gamma == 1.0 else ["mul", made, number(gamma)]


def selu(
    input: Any,
    alpha: float = 1.6732632423543772,
    gamma: float = 1.0507009873554805,
    output: Any = NullTensor,
    name: str = "",
) -> Tensor:
    """gamma times elu with `alpha` (Klambauer et al. 2017); any shape; fp32, fp16,
    bf16.
    """
    return activation("selu", input, output, name, _elu(float(alpha), float(gamma)))


def hard_sigmoid(
    input: Any, alpha: float = 0.2, beta: float = 0.5, output: Any = NullTensor, name: str = ""
) -> Tensor:
    """alpha * input + beta, between 0 and 1; fp32, fp16, bf16."""
    return activation("hard_sigmoid", input, output, name, _hard(float(alpha), float(beta)))


def _hard(alpha: float, beta: float) -> Tree:
    line = ["add", ["mul", X, number(alpha)], number(beta)]
    return ["minimum", ["maximum", line, number(0.0)], number(1.0)]


def hard_swish(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """input * hard_sigmoid(input, 1/6, 1/2) (Howard et al. 2019); any shape; fp32, fp16,
    bf16.
    """
    return activation("hard_swish", input, output, name, ["mul", X, _hard(1.0 / 6.0, 0.5)])


def _log1p_exp(x: Tree) -> Tree:
    """log(1 + e^x), without overflow."""
    return ["add", ["maximum", x, number(0.0)], ["log1p", ["exp", ["neg", ["abs", x]]]]]


def log_sigmoid(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """log(sigmoid(input)), elementwise; any shape; fp32, fp16, bf16."""
    return activation("log_sigmoid", input, output, name, ["neg", _log1p_exp(["neg", X])])


def mish(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """input * tanh(log(1 + e^input)) (Misra 2019); any shape; fp32, fp16, bf16."""
    return activation("mish", input, output, name, ["mul", X, ["tanh", _log1p_exp(X)]])


def softsign(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """input / (1 + |input|); fp32, fp16, bf16."""
    tree = ["div", X, ["add", ["abs", X], number(1.0)]]
    return activation("softsign", input, output, name, tree)


def gelu_erf(input: Any, output: Any = NullTensor, name: str = "") -> Tensor:
    """GELU by its definition, input times the normal distribution (Hendrycks and Gimpel
    2016); any shape; fp32, fp16, bf16.
    """
    normal = ["add", ["erf", ["mul", X, number(math.sqrt(0.5))]], number(1.0)]
    return activation("gelu_erf", input, output, name, ["mul", ["mul", X, number(0.5)], normal])


ACTIVATIONS: tuple[Callable[..., Tensor], ...] = (
    leaky_relu,
    elu,
    selu,
    hard_sigmoid,
    hard_swish,
    log_sigmoid,
    mish,
    softsign,
    gelu_erf,
)
for _activation in ACTIVATIONS:
    composed(_activation.__name__)
