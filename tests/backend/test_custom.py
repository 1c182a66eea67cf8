"""Custom ops run on every backend, in every type, with NumPy's results."""

from __future__ import annotations

import numpy as np

import ark
from tests import custom
from tests.opcheck import Case, check

FLOATS = (ark.fp32, ark.fp16, ark.bf16)


def test_custom_ops_equal_numpy(backend: str) -> None:
    random = np.random.default_rng(0)
    x, w = random.uniform(-1, 1, (13, 37)), random.uniform(-1, 1, 37)
    scale, blur, shares = custom.scale(), custom.blur(), custom.shares()
    cases = []
    for t in FLOATS:
        cases += [
            Case(f"scale {t}", [(x, t), (w, t)], scale, lambda x, w: x * w * 2.0),
            Case(f"blur {t}", [(x, t)], blur, custom.blur_in_numpy),
            Case(
                f"shares {t}",
                [(x, t)],
                lambda a: shares(a)[0],
                lambda a: custom.shares_in_numpy(a)[0],
            ),
        ]
    y = random.uniform(-1, 1, (6, 9))
    cases.append(
        Case(
            "views and neighbours",
            [(x, ark.fp32), (y, ark.fp32)],
            lambda a, b: ark.relu(scale(ark.exp(a[2:8, 3:12]), ark.reshape(b[:1], [9]), by=3.0)),
            lambda a, b: np.maximum(np.exp(a[2:8, 3:12]) * b[0] * 3.0, 0.0),
        )
    )
    check(cases)


def test_in_place_updates_accumulate_over_launches(backend: str) -> None:
    x, total = ark.tensor([150], ark.int32), ark.tensor([150], ark.int32)
    custom.count_up()(x, total, twice=True)
    custom.count_up()(x, total, twice=False)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=True)
        x.from_numpy(np.arange(150, dtype=np.int32))
        runtime.run(4)
        np.testing.assert_array_equal(total.to_numpy(), 12 * np.arange(150))
