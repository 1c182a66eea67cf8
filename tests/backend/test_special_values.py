"""Functions outside of their domain, at its ends, and of what is no number, beside NumPy."""

from __future__ import annotations

import numpy as np

import ark

LARGEST = 3.4e38
VALUES = np.array(
    [np.nan, np.inf, -np.inf, 0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 1e19, 1e30, LARGEST, -LARGEST],
    np.float32,
)
FUNCTIONS = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "ln": np.log,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
}


def test_functions_at_special_values(backend: str) -> None:
    ark.init(backend=backend)
    x, y = (np.ascontiguousarray(side.ravel()) for side in np.meshgrid(VALUES, VALUES))
    alone = ark.tensor([len(VALUES)])
    left, right = ark.tensor([len(x)]), ark.tensor([len(x)])
    made = {name: getattr(ark, name)(alone) for name in FUNCTIONS}
    power = ark.pow(left, right)
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
