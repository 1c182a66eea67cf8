"""Functions of every bf16 and fp16 number, whose device functions are shorter than those of fp32
(ark/backend/codegen/device/math16.h), compared with NumPy's in fp64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import ark
from ark.ir.dtype import DataType, bf16, fp16

MAX_ULP = 0.5 + 1 / 32
FRACTION_BITS, LEAST_EXPONENT = {"bf16": 7, "fp16": 10}, {"bf16": -126, "fp16": -14}
Reference = Callable[[np.ndarray], np.ndarray]


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))))


FUNCTIONS: dict[str, Reference] = {
    "acos": np.arccos,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "cos": np.cos,
    "cosh": np.cosh,
    "log1p": np.log1p,
    "log_sigmoid": lambda x: -_softplus(-x),
    "mish": lambda x: np.asarray(x * np.tanh(_softplus(x))),
    "sin": np.sin,
    "sinh": np.sinh,
    "tan": np.tan,
    "tanh": np.tanh,
}


@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
def test_functions_of_every_number(backend: str, dtype: DataType) -> None:
    ark.init(backend=backend)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy)
    x = ark.tensor([1 << 16], dtype)
    outputs = {name: getattr(ark, name)(x) for name in FUNCTIONS}
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(numbers)
        runtime.run()
        for name, function in FUNCTIONS.items():
            with np.errstate(all="ignore"):
                want = function(numbers.astype(np.float64))
                nearest = want.astype(dtype.numpy).astype(np.float64)
            got = outputs[name].to_numpy().astype(np.float64)
            finite = np.isfinite(nearest)
            np.testing.assert_array_equal(got[~finite], nearest[~finite], name)
            least = LEAST_EXPONENT[dtype.name]
            _, exponent = np.frexp(want[finite])
            unit = np.exp2(np.maximum(exponent - 1, least) - FRACTION_BITS[dtype.name])
            errors = np.abs(got[finite] - want[finite]) / unit
            worst = int(np.argmax(errors))
            assert errors[worst] <= MAX_ULP, (name, numbers[finite][worst], errors[worst])
