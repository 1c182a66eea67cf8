"""Functions outside of their domain, at its ends, and of what is no number, beside NumPy."""

from __future__ import annotations

import numpy as np
import torch

import ark

LARGEST = 3.4e38
VALUES = np.array(
    [
        np.nan,
        np.inf,
        -np.inf,
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -0.5,
        2.0,
        -2.0,
        1e19,
        1e30,
        LARGEST,
        -LARGEST,
    ],
    np.float32,
)
FUNCTIONS = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "expm1": np.expm1,
    "ln": np.log,
    "log1p": np.log1p,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def test_functions_at_special_values(backend: str) -> None:
    ark.init(backend=backend)
    x, y = (np.ascontiguousarray(side.ravel()) for side in np.meshgrid(VALUES, VALUES))
    alone = ark.tensor([len(VALUES)])
    left, right = ark.tensor([len(x)]), ark.tensor([len(x)])
    made = {name: getattr(ark, name)(alone) for name in FUNCTIONS}
    power, angle = ark.pow(left, right), ark.atan2(left, right)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, values in ((alone, VALUES), (left, x), (right, y)):
            tensor.from_numpy(values)
        runtime.run()
        with np.errstate(all="ignore"):
            for name, function in FUNCTIONS.items():
                want = function(VALUES.astype(np.float64)).astype(np.float32)
                np.testing.assert_allclose(
                    made[name].to_numpy(), want, rtol=2e-5, atol=2e-6, err_msg=name
                )
            want = np.power(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(power.to_numpy(), want, rtol=2e-5, err_msg="pow")
            want = np.arctan2(x.astype(np.float64), y.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(angle.to_numpy(), want, rtol=2e-5, err_msg="atan2")


def test_functions_keep_the_digits_of_small_values(backend: str) -> None:
    """Where e^x - 1 and log(1 + y) would lose them: beside torch in fp64, relative to the value."""
    ark.init(backend=backend)
    sizes = np.geomspace(1e-30, 30.0, 200)
    values = np.concatenate([sizes, -sizes]).astype(np.float32)
    x = ark.tensor([len(values)])
    functions = {
        "expm1": torch.expm1,
        "log1p": torch.log1p,
        "elu": torch.nn.functional.elu,
        "selu": torch.selu,
        "log_sigmoid": torch.nn.functional.logsigmoid,
        "mish": torch.nn.functional.mish,
    }
    made = {name: getattr(ark, name)(x) for name in functions}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        runtime.run()
        for name, function in functions.items():
            want = function(torch.from_numpy(values.astype(np.float64))).numpy()
            np.testing.assert_allclose(made[name].to_numpy(), want, rtol=4e-6, err_msg=name)
