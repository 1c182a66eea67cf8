"""GELU written out by its definition becomes one device function, in whatever order its factors are
written. Its values equal torch's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import ark
from ark.tasks import text
from ark.tasks.expression import Writer, leaf, number
from ark.tasks.gelu import gelu_argument

X = ["add", leaf(0), leaf(1)]
HALF, ONE = number(0.5), number(1.0)
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
OTHER = [
    ["mul", ["mul", X, number(0.6)], NORMAL],
    ["mul", ["mul", leaf(0), HALF], NORMAL],
    ["mul", X, NORMAL],
    ["mul", ["mul", X, HALF], ["add", ["erf", ["mul", X, number(0.7)]], ONE]],
    ["add", ["mul", X, HALF], NORMAL],
]


@pytest.mark.parametrize("tree", SAME)
def test_each_order_of_factors_is_one_call(tree) -> None:
    assert gelu_argument(tree) == X
    writer = Writer([("a0", "float"), ("a1", "float")], text.literal)
    writer.write(tree)
    assert sum("ark_gelu_erf" in line for line in writer.statements) == 1
    assert not any("ark_erf" in line for line in writer.statements)


@pytest.mark.parametrize("tree", OTHER)
def test_other_factors_are_computed_as_they_are(tree) -> None:
    assert gelu_argument(tree) is None


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_values_are_torchs(approximate) -> None:
    """Includes small results for negative inputs, for which the definition in fp32 loses digits."""
    torch = pytest.importorskip("torch")
    x = torch.cat([torch.linspace(-6, 8, 4001), torch.tensor([0.0, 50.0, torch.inf, torch.nan])])
    call = ark.gelu_erf if approximate == "none" else ark.gelu
    values = call(x).eval()
    want = torch.nn.functional.gelu(x.double(), approximate=approximate)
    np.testing.assert_allclose(np.asarray(values), want.numpy(), rtol=5e-5, atol=1e-12)
