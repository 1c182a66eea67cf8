"""Ops on short rows, of which a warp processes several at once, and ops that sort the largest
elements of a row, on every backend, compared with NumPy.
"""

from __future__ import annotations

import numpy as np

import ark
from tests.cases.ops import integers, values
from tests.opcheck import TOLERANCE, Case, check


def test_several_rows_per_warp_equal_numpy(backend: str) -> None:
    """Row operations in which a few lanes of a warp share a row. The number of rows is such that in
    the last pass some lanes have no row.
    """

    def softmax(x: np.ndarray) -> np.ndarray:
        e = np.exp(x - x.max(1, keepdims=True))
        return e / e.sum(1, keepdims=True)

    cases = []
    for dtype, sizes in ((ark.fp32, ((301, 8), (77, 3), (65, 20))), (ark.bf16, ((530, 16),))):
        for rows, n in sizes:
            given, close = [(values(rows, n, seed=n), dtype)], TOLERANCE[dtype.name]
            name = f"of {n} {dtype}"
            cases += [
                Case(f"softmax {name}", given, ark.softmax, softmax, close),
                Case(
                    f"sums {name}",
                    given,
                    lambda x: ark.reduce_sum(x, 1),
                    lambda x: x.sum(1, keepdims=True),
                    close,
                ),
                Case(
                    f"largest squares {name}",
                    given,
                    lambda x: ark.reduce_max(ark.mul(x, x), 1),
                    lambda x: (x * x).max(1, keepdims=True),
                    close,
                ),
            ]
    check(cases)


def test_topk_of_short_rows_equals_numpy(backend: str) -> None:
    """topk of integers, with many equal elements: as in a stable sort, the first of them comes
    first.
    """
    some = [(integers(3, 300, seed=1), ark.fp32)]
    all_of = [(integers(2, 65, seed=2), ark.fp32)]

    def order(x: np.ndarray) -> np.ndarray:
        return np.argsort(-x, axis=1, kind="stable")

    check(
        [
            Case("values", some, lambda x: ark.topk(x, 70)[0], lambda x: -np.sort(-x, 1)[:, :70]),
            Case("places", some, lambda x: ark.topk(x, 70)[1], lambda x: order(x)[:, :70]),
            Case("all of them", all_of, lambda x: ark.topk(x, 65)[1], order),
            Case(
                "the first of the least",
                some,
                lambda x: ark.argmin(x, axis=0),
                lambda x: x.argmin(0)[None],
            ),
        ]
    )
