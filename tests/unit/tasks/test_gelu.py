"""GELU written out by its definition, or with tanh, becomes one device function, in whatever order
its factors are written. Its values equal torch's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import ark
from ark.tasks import text
from ark.tasks.expression import Writer, evaluate, leaf, number, size, written_size
from ark.tasks.gelu import Gelu, gelu_of

X = ["add", leaf(0), leaf(1)]
HALF, ONE = number(0.5), number(1.0)
DENSITY = 1 / math.sqrt(2 * math.pi)
NORMAL = ["add", ["erf", ["mul", X, number(math.sqrt(0.5))]], ONE]
BY_ROOT = ["add", ONE, ["erf", ["div", X, number(float(np.float32(math.sqrt(2))))]]]
SAME = [
    ["mul", ["mul", X, HALF], NORMAL],
    ["mul", BY_ROOT, ["mul", HALF, X]],
    ["mul", ["mul", X, BY_ROOT], HALF],
    ["mul", HALF, ["mul", NORMAL, X]],
    ["mul", X, ["mul", HALF, NORMAL]],
    ["mul", ["div", X, number(2.0)], BY_ROOT],
]
SCALE, CUBIC = number(math.sqrt(2 / math.pi)), number(0.044715)
SQUARE = ["mul", X, X]
CUBE = ["mul", SQUARE, X]
TANH = [
    ["tanh", ["mul", SCALE, ["add", X, ["mul", CUBIC, CUBE]]]],
    ["tanh", ["mul", ["add", ["mul", ["pow", X, number(3.0)], CUBIC], X], SCALE]],
    ["tanh", ["mul", SCALE, ["add", X, ["mul", ["mul", ["mul", CUBIC, X], X], X]]]],
    ["tanh", ["mul", ["mul", X, SCALE], ["add", ONE, ["mul", ["mul", CUBIC, X], X]]]],
    ["tanh", ["mul", X, ["mul", ["add", ["mul", SQUARE, CUBIC], ONE], SCALE]]],
]
OTHER = [
    ["mul", ["mul", X, number(0.6)], NORMAL],
    ["mul", ["mul", leaf(0), HALF], NORMAL],
    ["mul", X, NORMAL],
    ["mul", ["mul", X, HALF], ["add", ["erf", ["mul", X, number(0.7)]], ONE]],
    ["add", ["mul", X, HALF], NORMAL],
]
OTHER_TANH = [
    ["tanh", ["mul", SCALE, X]],
    ["tanh", ["mul", SCALE, ["add", X, ["mul", CUBIC, SQUARE]]]],
    ["tanh", ["mul", SCALE, ["add", X, ["mul", number(0.04), CUBE]]]],
    ["tanh", ["mul", number(0.8), ["add", X, ["mul", CUBIC, CUBE]]]],
    ["tanh", ["mul", SCALE, ["add", leaf(0), ["mul", CUBIC, CUBE]]]],
    ["tanh", ["mul", ["mul", X, SCALE], ["add", X, ["mul", CUBIC, CUBE]]]],
    ["tanh", ["mul", ["mul", leaf(0), SCALE], ["add", ONE, ["mul", CUBIC, SQUARE]]]],
    ["tanh", ["mul", SCALE, ["add", ONE, ["mul", CUBIC, SQUARE]]]],
]
ROOT = ["mul", X, number(math.sqrt(0.5))]
POWERS = [["exp", ["neg", ["mul", ROOT, ROOT]]], ["exp", ["neg", ["mul", SQUARE, HALF]]]]
SLOPES = [
    ["add", ["mul", NORMAL, HALF], ["mul", ["mul", X, number(DENSITY)], POWERS[1]]],
    [
        "add",
        ["mul", ["mul", X, HALF], ["mul", POWERS[0], number(2 * DENSITY)]],
        ["mul", HALF, BY_ROOT],
    ],
]
OTHER_SLOPES = [
    ["add", ["mul", NORMAL, HALF], ["mul", ["mul", X, number(0.4)], POWERS[1]]],
    ["add", ["mul", NORMAL, HALF], ["mul", number(DENSITY), POWERS[1]]],
    ["add", ["mul", NORMAL, HALF], ["mul", ["mul", X, number(DENSITY)], ["exp", ["neg", SQUARE]]]],
    [
        "add",
        ["mul", NORMAL, HALF],
        ["mul", ["mul", X, number(DENSITY)], ["exp", ["mul", SQUARE, HALF]]],
    ],
    ["add", ["mul", NORMAL, number(0.6)], ["mul", ["mul", X, number(DENSITY)], POWERS[1]]],
    ["add", ["mul", ["add", ONE, TANH[0]], HALF], ["mul", ["mul", X, number(DENSITY)], POWERS[1]]],
]


def by_tanh(tanh):
    return ["mul", ["mul", X, HALF], ["add", ONE, tanh]]


@pytest.mark.parametrize(
    ("tree", "function"),
    [(t, "ark_gelu_erf") for t in SAME]
    + [(by_tanh(t), "ark_gelu") for t in TANH]
    + [(["mul", HALF, ["mul", ["add", TANH[0], ONE], X]], "ark_gelu")]
    + [(t, "ark_gelu_erf_slope") for t in SLOPES],
)
def test_each_order_of_factors_is_one_call(tree, function) -> None:
    assert gelu_of(tree) == Gelu(function, X)
    writer = Writer([("a0", "float"), ("a1", "float")], text.literal)
    writer.write(tree)
    assert sum(f"{function}(" in line for line in writer.statements) == 1
    assert not any(f"ark_{n}(" in line for line in writer.statements for n in ("erf", "tanh"))
    assert written_size(tree) == 1 + size(X)


@pytest.mark.parametrize("tree", [*OTHER, *(by_tanh(t) for t in OTHER_TANH), *OTHER_SLOPES])
def test_other_factors_are_computed_as_they_are(tree) -> None:
    assert gelu_of(tree) is None
    assert written_size(tree) == size(tree)


@pytest.mark.parametrize("tree", [by_tanh(t) for t in TANH])
def test_forms_with_tanh_are_gelu(tree) -> None:
    """Checks the trees of this file with their definition in float64."""
    x = np.linspace(-4.0, 4.0, 101)
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    values = evaluate(tree, [x, np.zeros_like(x)], x.shape)
    np.testing.assert_allclose(values, 0.5 * x * (1 + np.tanh(inner)), atol=1e-12)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_values_equal_torch(approximate) -> None:
    """The device function gives torch's values, also small results for negative inputs, for which
    the formula in fp32 loses digits.
    """
    torch = pytest.importorskip("torch")
    x = torch.cat([torch.linspace(-6, 8, 4001), torch.tensor([0.0, 50.0, torch.inf, torch.nan])])
    call = ark.gelu_erf if approximate == "none" else ark.gelu
    values = call(x).eval()
    want = torch.nn.functional.gelu(x.double(), approximate=approximate)
    np.testing.assert_allclose(np.asarray(values), want.numpy(), rtol=5e-5, atol=1e-12)


def test_slopes_equal_torch() -> None:
    """The derivative of GELU by its definition, beside torch's gradient in float64."""
    torch = pytest.importorskip("torch")
    x = torch.cat([torch.linspace(-8, 8, 4001), torch.tensor([0.0, 50.0, -50.0, torch.nan])])
    given = ark.tensor(list(x.shape), ark.fp32)
    slope = ark.grad(ark.gelu_erf(given), given, ark.ones(list(x.shape), ark.fp32))
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        given.from_numpy(x.numpy())
        runtime.run()
        values = slope.to_numpy()
    exact = x.double().requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.gelu(exact).sum(), exact)
    np.testing.assert_allclose(values, want.numpy(), rtol=1e-6, atol=4e-7)


def test_values_of_the_written_form_equal_torch() -> None:
    """GELU written out by its formula gives torch's values on the device. Evaluated in fp32 as
    written, it would give 0 for inputs below -5.
    """
    torch = pytest.importorskip("torch")
    x = torch.linspace(-6, 8, 4001)

    def written(x):
        inner = ark.mul(ark.add(x, ark.mul(ark.pow(x, 3.0), 0.044715)), math.sqrt(2 / math.pi))
        return ark.mul(ark.mul(x, 0.5), ark.add(ark.tanh(inner), 1.0))

    given = ark.tensor(list(x.shape), ark.fp32)
    result = written(given)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        given.from_numpy(x.numpy())
        runtime.run()
        values = result.to_numpy()
    want = torch.nn.functional.gelu(x.double(), approximate="tanh")
    np.testing.assert_allclose(values, want.numpy(), rtol=5e-5, atol=1e-12)
