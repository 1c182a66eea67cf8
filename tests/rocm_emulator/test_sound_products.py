"""The emulator's checks report nothing for correct products. The sizes are not multiples of any
tile, so lanes and tiles extend past the last row or column.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.ir.dtype import DataType

emulator = pytest.importorskip("ark_rocm_emulator")
pytest.importorskip("hip")

# The products: (shape of the left matrices, shape of the right ones, True if the right ones are
# stored by columns).
SHAPES = [
    ((16, 5, 24), (17, 24), True),
    ((16, 5, 24), (24, 17), False),
    ((40, 7, 9), (40, 3, 9), True),
    ((5, 33, 20), (5, 20, 33), False),
    ((3, 1, 12), (3, 5, 12), True),
    ((30, 17, 30), (30, 31, 30), True),
    ((7, 70), (9, 70), True),
]
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}


@pytest.mark.parametrize("dtype", [ark.bf16, ark.fp32], ids=str)
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100"])
def test_correct_products_of_odd_sizes_are_not_reported(arch: str, dtype: DataType) -> None:
    rng = np.random.default_rng(3)
    with emulator.emulated(arch, checks=1):
        ark.init(backend="rocm")
        cases = []
        for left, right, turned in SHAPES:
            arrays = [rng.standard_normal(s).astype(dtype.numpy) for s in (left, right)]
            tensors = [ark.tensor(s, dtype) for s in (left, right)]
            cases.append((arrays, tensors, ark.matmul(*tensors, transpose_other=turned), turned))
        with ark.Runtime() as runtime:
            runtime.launch(loop_mode=False)
            for arrays, tensors, _, _ in cases:
                for tensor, array in zip(tensors, arrays, strict=True):
                    tensor.from_numpy(array)
            runtime.run(1)
            for (a, b), _, result, turned in cases:
                x, y = a.astype(np.float64), b.astype(np.float64)
                want = x @ (y.swapaxes(-1, -2) if turned else y)
                error = np.abs(result.to_numpy().astype(np.float64) - want).max()
                assert error <= TOLERANCE[dtype.name] * np.abs(want).max(), (a.shape, b.shape)
        assert emulator.failures() == []
