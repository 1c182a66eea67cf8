"""Elementwise functions: roots, logarithms, rounding, trigonometry, activations, gated activations.

ark.tasks.functions defines the functions. An activation that consists of several functions is added
as one node with one expression, so that it reads and writes memory once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ark.frontend.tensor import Output, Tensor, TensorLike, as_tensor
from ark.ir.dtype import bool_
from ark.ops.base import broadcast, float_dtype, result, same_dtype
from ark.ops.elementwise import composed, unary
from ark.tasks.expression import Tree, leaf, number
from ark.tasks.functions import FUNCTIONS, Gated

X = leaf(0)


def _op(
    name: str,
    meaning: str,
    example: tuple[str, str],
    integers: bool = False,
    predicate: bool = False,
    called: str = "",
) -> Callable[..., Tensor]:
    """Creates the users' function for an entry of ark.tasks.functions.

    example: elements of a tensor and of the result, for the docstring. called: the name of the
        users' function, if it differs from the entry's.
    """

    def apply(input: Any, output: Any = None, label: str = "") -> Tensor:
        return unary(name, input, output, label, integers, bool_ if predicate else None)

    def op(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
        return apply(input, output, name)

    types = "fp32, fp16, bf16, integers" if integers else "fp32, fp16, bf16"
    op.__name__ = op.__qualname__ = called or name
    op.__doc__ = f"""{meaning}, elementwise; any shape; {types}{", to bool" if predicate else ""}.

    Examples:
        >>> ark.{op.__name__}(torch.tensor({example[0]})).eval()
        tensor({example[1]})
    """
    return op


ln = _op("log", "Natural logarithm", ("[1.0, 2.0, 4.0]", "[0.0000, 0.6931, 1.3863]"), called="ln")
expm1 = _op(
    "expm1",
    "e^input - 1, exact where input is small",
    ("[-1.0, 0.0, 2.0]", "[-0.6321,  0.0000,  6.3891]"),
)
log1p = _op(
    "log1p",
    "Natural logarithm of 1 + input, exact where input is small",
    ("[1.0, 2.0, 4.0]", "[0.6931, 1.0986, 1.6094]"),
)
reciprocal = _op("reciprocal", "1 / input", ("[1.0, 2.0, 4.0]", "[1.0000, 0.5000, 0.2500]"))
neg = _op("neg", "-input; integers wrap", ("[-1.0, 0.0, 2.0]", "[ 1., -0., -2.]"), integers=True)
abs = _op(
    "abs",
    "|input|; the smallest integer of a type stays negative",
    ("[-1.0, 0.0, 2.0]", "[1., 0., 2.]"),
    integers=True,
)
sign = _op("sign", "The sign: -1, 0 or 1", ("[-1.0, 0.0, 2.0]", "[-1.,  0.,  1.]"), integers=True)
floor = _op(
    "floor",
    "The largest whole number that is not above the input",
    ("[-1.5, 0.4, 2.5]", "[-2.,  0.,  2.]"),
    integers=True,
)
ceil = _op(
    "ceil",
    "The smallest whole number that is not below the input",
    ("[-1.5, 0.4, 2.5]", "[-1.,  1.,  3.]"),
    integers=True,
)
round = _op(
    "round",
    "The nearest whole number; ties go to the even one",
    ("[-1.5, 0.4, 2.5]", "[-2.,  0.,  2.]"),
    integers=True,
)
tanh = _op("tanh", "Hyperbolic tangent", ("[-1.0, 0.0, 2.0]", "[-0.7616,  0.0000,  0.9640]"))
erf = _op(
    "erf",
    "Gauss error function (Abramowitz and Stegun 1964, 7.1.26)",
    ("[-1.0, 0.0, 2.0]", "[-0.8427,  0.0000,  0.9953]"),
)
sin = _op("sin", "Sine of radians", ("[-1.0, 0.0, 2.0]", "[-0.8415,  0.0000,  0.9093]"))
cos = _op("cos", "Cosine of radians", ("[-1.0, 0.0, 2.0]", "[ 0.5403,  1.0000, -0.4161]"))
isnan = _op(
    "isnan",
    "True where the element is NaN",
    ('[1.0, float("nan"), float("inf")]', "[False,  True, False]"),
    predicate=True,
)
isinf = _op(
    "isinf",
    "True where the element is infinite",
    ('[1.0, float("nan"), float("inf")]', "[False, False,  True]"),
    predicate=True,
)


def _gated(function: str, given: Gated) -> Any:
    """Creates the users' function for an entry of ark.tasks.functions that is a gated
    activation.
    """

    def op(gate: TensorLike, up: TensorLike, output: Output = None, name: str = "") -> Tensor:
        left, right = as_tensor(gate), as_tensor(up)
        float_dtype(function, left)
        dtype = same_dtype(function, left, right)
        shape = broadcast(left.ir.shape, right.ir.shape, function)
        return result(function, [left, right], shape, dtype, output, name=name)

    first, second, expected = given.example
    op.__name__ = op.__qualname__ = function
    op.__doc__ = f"""{given.meaning}; fp32, fp16, bf16, broadcasting.

    Examples:
        >>> ark.{function}(torch.tensor({first}), torch.tensor({second})).eval()
        tensor({expected})
    """
    return op


GATED: dict[str, Any] = {
    f.name: _gated(f.name, f.gated) for f in FUNCTIONS.values() if f.gated is not None
}
ENTRIES: dict[str, Any] = {
    **{
        f.name: _op(f.name, f.public.meaning, f.public.example)
        for f in FUNCTIONS.values()
        if f.public is not None
    },
    **GATED,
}
"""The users' functions that are generated completely from entries of ark.tasks.functions, by name.
"""


def activation(name: str, input: Any, output: Any, label: str, tree: Tree) -> Tensor:
    """Adds an elementwise node that computes the expression `tree` of one floating-point tensor."""
    tensor = as_tensor(input)
    dtype = float_dtype(name, tensor)
    return result(name, [tensor], tensor.ir.shape, dtype, output, {"expr": tree}, label)


def _positive(tree: Tree) -> Tree:
    return ["greater", tree, number(0.0)]


def leaky_relu(
    input: TensorLike, slope: float = 0.01, output: Output = None, name: str = ""
) -> Tensor:
    """input where the input is positive, elsewhere slope * input; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.leaky_relu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.0100,  0.0000,  2.0000])
    """
    tree = ["where", _positive(X), X, ["mul", X, number(float(slope))]]
    return activation("leaky_relu", input, output, name, tree)


def elu(input: TensorLike, alpha: float = 1.0, output: Output = None, name: str = "") -> Tensor:
    """input where it is positive, elsewhere alpha * (e^input - 1) (Clevert et al. 2015).

    Any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.elu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.6321,  0.0000,  2.0000])
    """
    return activation("elu", input, output, name, _elu(float(alpha), 1.0))


def _elu(alpha: float, gamma: float) -> Tree:
    below = ["expm1", ["minimum", X, number(0.0)]]
    branches = ["where", _positive(X), X, ["mul", below, number(alpha)]]
    return branches if gamma == 1.0 else ["mul", branches, number(gamma)]


def selu(
    input: TensorLike,
    alpha: float = 1.6732632423543772,
    gamma: float = 1.0507009873554805,
    output: Output = None,
    name: str = "",
) -> Tensor:
    """gamma * elu(input, alpha) (Klambauer et al. 2017); any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.selu(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-1.1113,  0.0000,  2.1014])
    """
    return activation("selu", input, output, name, _elu(float(alpha), float(gamma)))


def hard_sigmoid(
    input: TensorLike, alpha: float = 0.2, beta: float = 0.5, output: Output = None, name: str = ""
) -> Tensor:
    """alpha * input + beta, limited to [0, 1]; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.hard_sigmoid(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([0.3000, 0.5000, 0.9000])
    """
    return activation("hard_sigmoid", input, output, name, _hard(float(alpha), float(beta)))


def _hard(alpha: float, beta: float) -> Tree:
    line = ["add", ["mul", X, number(alpha)], number(beta)]
    return ["minimum", ["maximum", line, number(0.0)], number(1.0)]


def hard_swish(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """input * hard_sigmoid(input, 1/6, 1/2) (Howard et al. 2019); any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.hard_swish(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.3333,  0.0000,  1.6667])
    """
    return activation("hard_swish", input, output, name, ["mul", X, _hard(1.0 / 6.0, 0.5)])


def log_sigmoid(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """log(sigmoid(input)), elementwise; any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.log_sigmoid(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-1.3133, -0.6931, -0.1269])
    """
    return activation("log_sigmoid", input, output, name, ["neg", ["softplus", ["neg", X]]])


def mish(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """input * tanh(log(1 + e^input)) (Misra 2019); any shape; fp32, fp16, bf16.

    Examples:
        >>> ark.mish(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.3034,  0.0000,  1.9440])
    """
    return activation("mish", input, output, name, ["mul", X, ["tanh", ["softplus", X]]])


def softsign(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """input / (1 + |input|); fp32, fp16, bf16.

    Examples:
        >>> ark.softsign(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.5000,  0.0000,  0.6667])
    """
    tree = ["div", X, ["add", ["abs", X], number(1.0)]]
    return activation("softsign", input, output, name, tree)


def gelu_erf(input: TensorLike, output: Output = None, name: str = "") -> Tensor:
    """Exact GELU: input * Phi(input), Phi the standard normal CDF (Hendrycks and Gimpel 2016).

    Any shape; fp32, fp16, bf16. -inf gives 0 and inf gives inf, the limits.

    Examples:
        >>> ark.gelu_erf(torch.tensor([-1.0, 0.0, 2.0])).eval()
        tensor([-0.1587,  0.0000,  1.9545])
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
