"""msGeMM: products with 4-bit weights by table look-up, compared with dequantising and multiplying.

Y = A X, where A (rows, k) is int4 or uint4 with a scale for each group of a row, and X is (k,
columns). For every d neighbouring weights of a row, a table has the sum of products for each of the
16^d values that the d weights can have together. A row of Y is then a sum of k / d table entries.
The program uses only general ops: broadcast additions, a gather, and sums.

    python -m examples.msgemm.msgemm
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.common.plot import Panel, page

WEIGHT_BITS = 4
VALUES = 1 << WEIGHT_BITS


def elements(dtype: Any) -> np.ndarray:
    """The numbers that the codes 0 to 15 represent. int4 is two's complement."""
    codes = np.arange(VALUES)
    return codes - VALUES * (codes >= VALUES // 2) if dtype is ark.int4 else codes


def packed(weight: np.ndarray, d: int) -> np.ndarray:
    """The codes (rows, k / d) int32 of weights (rows, k). A code has the bits of d weights, the
    first in the lowest bits.
    """
    rows, k = weight.shape
    if k % d:
        raise ValueError(
            f"{k} weights in a row are not divisible into groups of {d}; choose a d that divides "
            "them"
        )
    bits = weight.astype(np.int32).reshape(rows, k // d, d) & (VALUES - 1)
    return (bits << (WEIGHT_BITS * np.arange(d))).sum(2).astype(np.int32)


def tables(x: Any, values: Any, d: int) -> Any:
    """The table (k / d * 16^d, columns) of all sums of d products, for x (k, columns) and values
    (1, 16, 1).

    An entry costs one addition: the table for t + 1 weights is made from the table for t weights by
    adding each of the 16 products of the next weight to each entry.
    """
    k, columns = x.shape()
    groups = ark.reshape(x, [k // d, d, columns])
    table = ark.mul(groups[:, 0:1], values)
    for t in range(1, d):
        size = VALUES**t
        following = ark.reshape(ark.mul(groups[:, t : t + 1], values), [k // d, VALUES, 1, columns])
        table = ark.add(following, ark.reshape(table, [k // d, 1, size, columns]))
        table = ark.reshape(table, [k // d, VALUES * size, columns])
    return ark.reshape(table, [k // d * VALUES**d, columns])


def looked_up(codes: Any, table: Any, scales: Any = None) -> Any:
    """Y (rows, columns): the sum of the table entries of codes (rows, k / d). With scales (rows,
    groups), the sum of each group is multiplied by its scale first.
    """
    rows, count = codes.shape()
    columns = table.shape()[1]
    first = ark.mul(ark.iota([1, count], 1, ark.int32), table.shape()[0] // count)
    entries = ark.gather(table, ark.add(codes, first))
    if scales is None:
        return ark.reshape(ark.reduce_sum(entries, 1), [rows, columns])
    groups = scales.shape()[1]
    apart = ark.reshape(entries, [rows, groups, count // groups, columns])
    sums = ark.reshape(ark.reduce_sum(apart, 2), [rows, groups, columns])
    scaled = ark.mul(sums, ark.reshape(scales, [rows, groups, 1]))
    return ark.reshape(ark.reduce_sum(scaled, 1), [rows, columns])


def formulas(rows: int, d: int) -> float:
    """The factor by which table look-up reduces the number of operations: d rows / (2^(4 d) +
    rows).
    """
    return d * rows / (2 ** (WEIGHT_BITS * d) + rows)


def run(
    build: Callable[[], tuple[Any, dict[Any, np.ndarray]]], repeats: int = 0, iterations: int = 16
) -> Any:
    """Runs a program. Returns the value of its result and the seconds of an iteration.

    build: adds the program to the model; returns its result tensor and the contents of its inputs.
    The seconds are those of the fastest of `repeats` launches, each of `iterations` iterations.
    """
    ark.Model.reset()
    product, given = build()
    best = np.inf
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in given.items():
            tensor.from_numpy(array)
        runtime.run()
        for _ in range(repeats):
            begin = time.perf_counter()
            runtime.run(iterations)
            best = min(best, (time.perf_counter() - begin) / iterations)
        return product.to_numpy(), best


def by_tables(
    weight: np.ndarray, x: np.ndarray, d: int, scales: np.ndarray | None, dtype: Any = ark.int4
) -> Callable[[], tuple[Any, dict[Any, np.ndarray]]]:
    """Returns a function that builds Y by table look-up. x is float32. Without scales it may also
    be int32, whose sums wrap around on overflow.
    """
    kind = ark.DataType.from_numpy(x.dtype)

    def build() -> tuple[Any, dict[Any, np.ndarray]]:
        codes = packed(weight, d)
        held = ark.tensor(x.shape, kind)
        given = {
            ark.tensor(codes.shape, ark.int32): codes,
            held: x,
            ark.tensor([1, VALUES, 1], kind): elements(dtype).astype(x.dtype).reshape(1, -1, 1),
        }
        index, _, values = given
        factors = None
        if scales is not None:
            factors = ark.tensor(scales.shape)
            given[factors] = scales
        return looked_up(index, tables(held, values, d), factors), given

    return build


def by_multiplying(
    weight: np.ndarray, x: np.ndarray, scales: np.ndarray, dtype: Any = ark.int4
) -> Callable[[], tuple[Any, dict[Any, np.ndarray]]]:
    """Returns a function that builds Y transposed, by ark.quantized_linear, whose input rows are
    the columns of x.
    """

    def build() -> tuple[Any, dict[Any, np.ndarray]]:
        columns = np.ascontiguousarray(x.T)
        held = ark.tensor(columns.shape), ark.tensor(weight.shape, dtype), ark.tensor(scales.shape)
        product = ark.quantized_linear(*held)
        four_bits = weight.astype(dtype.to_numpy())
        return product, dict(zip(held, (columns, four_bits, scales), strict=True))

    return build


def draw(rows: int, k: int, columns: int, group: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Weights (rows, k) of -8 to 7, x (k, columns) and scales (rows, k / group)."""
    random = np.random.default_rng(seed)
    weight = random.integers(-8, 8, (rows, k)).astype(np.int8)
    x = random.normal(size=(k, columns)).astype(np.float32)
    return weight, x, random.uniform(0.5, 2, (rows, k // group)).astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--k", type=int, default=192)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[256, 1024, 4096])
    parser.add_argument("--figure", type=Path, default=Path(__file__).with_name("msgemm.svg"))
    args = parser.parse_args()
    ark.init(backend=args.backend)
    sizes, depths = args.rows, (1, 2, 3)
    seconds: dict[str, list[float]] = {}
    for rows in sizes:
        weight, x, scales = draw(rows, args.k, args.columns, args.k // 4)
        want, taken = run(by_multiplying(weight, x, scales), repeats=5)
        seconds.setdefault("multiplied", []).append(taken)
        for d in depths:
            product, taken = run(by_tables(weight, x, d, scales), repeats=5)
            np.testing.assert_allclose(product, want.T, rtol=1e-3, atol=1e-3)
            seconds.setdefault(f"tables, d = {d}", []).append(taken)
    report = {name: [round(1e3 * s, 3) for s in each] for name, each in seconds.items()}
    print(json.dumps({"rows": sizes, "milliseconds": report}))
    counted = np.geomspace(64, 65536, 41)
    curves = {
        f"d = {d}": (np.log2(counted), [formulas(m, d) for m in counted]) for d in (1, 2, 3, 4)
    }
    most = max(max(each) for each in seconds.values()) * 1e3
    taken = {name: (np.log2(sizes), [1e3 * s for s in each]) for name, each in seconds.items()}
    panels = [
        Panel("operations saved by log2(rows)", curves, high=4.0),
        Panel("ms an iteration by log2(rows)", taken, high=float(f"{most:.1g}") * 1.5),
    ]
    args.figure.write_text(page("4-bit products by tables", panels), encoding="utf-8")


if __name__ == "__main__":
    main()
