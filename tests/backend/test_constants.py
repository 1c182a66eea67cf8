"""Expressions whose operands are all constants are computed in the types of their tensors."""

from __future__ import annotations

import numpy as np

import ark


def test_functions_of_constants(backend: str) -> None:
    """Functions of which all operands are constants: the type of the result is that of the
    constants, because no operand is a tensor in memory.
    """
    ark.init(backend=backend)

    def constant(value: float, dtype: ark.DataType = ark.fp32) -> ark.Tensor:
        return ark.constant(value, [4], dtype)

    whole = ark.cast(constant(3, ark.int32), ark.fp32)
    tensors = {
        2.0**0.5: ark.sqrt(constant(2.0)),
        3.5: ark.div(constant(7.0), constant(2.0)),
        1.75: ark.div(ark.div(constant(7.0), 2.0), ark.sqrt(constant(4.0))),
        10.5: ark.mul(whole, ark.div(constant(7.0), constant(2.0))),
        3.0: ark.cast(ark.div(constant(7, ark.int32), constant(2, ark.int32)), ark.fp32),
        256.0: ark.cast(constant(257.0, ark.bf16), ark.fp32),
        0.099975586: ark.mul(ark.cast(constant(0.1, ark.fp16), ark.fp32), 1.0),
        16.0: ark.cast(constant(17, ark.fp8_e4m3), ark.fp32),
        1.0: ark.exp(ark.zeros([4], ark.fp32)),
    }
    with ark.Runtime() as runtime:
        runtime.launch()
        runtime.run()
        for wanted, tensor in tensors.items():
            np.testing.assert_allclose(tensor.to_numpy(), [wanted] * 4, rtol=1e-6)
