"""Predicts the time of a product of bf16 matrices on an AMD GPU, for docs/rocm-timing.md.

The emulator takes a minute for 2^34 multiplications, so a large product is not run whole. Instead,
as many tiles as there are compute units are run at once, with two different values of k. The
difference of the two times is the time of the additional steps along k, from which the whole time
is computed. The result is predicted, not measured.

    python bench/rocm_matmul.py --shape 8192x8192x8192 --tile 256x128

A product of few tiles is run whole, with each of the named cuts (rows and columns of a tile, number
of parts of k) and with the cut that the planner chooses:

    python bench/rocm_matmul.py --shape 128x2048x2048 --cuts 128x32x1,128x128x8
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
from typing import Any

import ark_rocm_emulator
import numpy as np
from ark_rocm import backend

from ark.ir.dtype import bf16
from ark.ir.graph import Graph
from ark.lower.cuts import key
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor


def sizes(text: str) -> list[int]:
    return [int(n) for n in text.split("x")]


def microseconds(
    model: str,
    shape: list[int],
    turned: str,
    tile: tuple[int, int] | None = None,
    cut: list[int] | None = None,
) -> tuple[float, list[int]]:
    """Predicts the microseconds of a product of the given shape (rows, columns, k). The product is
    divided into tiles of the size `tile`, or as `cut` gives (rows and columns of a tile, parts of
    k), or else as the planner chooses. Also returns the rows and columns of a tile and the number
    of parts of k.
    """
    m, n, k = shape
    ta, tb = (letter == "t" for letter in turned)
    graph = Graph()
    a = graph.tensor((k, m) if ta else (m, k), bf16, arena="state", name="a")
    b = graph.tensor((n, k) if tb else (k, n), bf16, arena="state", name="b")
    c = graph.tensor((m, n), bf16, name="c")
    graph.add("matmul", [a, b], [c], {"transpose_a": ta, "transpose_b": tb}, "product")
    random = np.random.default_rng(0)
    with ark_rocm_emulator.emulated(model), contextlib.closing(backend.open(0)) as device:
        machine = device.machine
        options: dict[str, Any] = {"fuse": False}
        if tile:
            machine = dataclasses.replace(machine, tile=tile, large_tiles=((*tile, 1.0),))
        if cut:
            options["cuts"] = {key((1, 1, m, n), k, bf16.itemsize): cut}
        product_plan = plan(graph, machine, options)
        verify([product_plan])
        params = product_plan.ops[0].params
        planned_tile = [*params["tile"], params.get("splits", 1)]
        if cut and planned_tile != cut:
            raise SystemExit(f"no kernel has the cut {cut} of {shape}")
        with Executor(product_plan, backend, device) as executor:
            for x in (a, b):
                executor.write(x.name, random.standard_normal(x.shape).astype(bf16.to_numpy()))
            run = executor.start(1)
            run.wait(3600)
            return run.elapsed_ms() * 1e3, planned_tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mi300x")
    parser.add_argument("--shape", type=sizes, default=[8192, 8192, 8192], help="MxNxK")
    parser.add_argument("--tile", type=sizes, default=[256, 128], help="rows x columns")
    parser.add_argument("--transposes", default="nt", help="of a and b, as in BLAS")
    parser.add_argument("--depths", type=sizes, default=[512, 1536], help="two that are run")
    parser.add_argument("--cuts", help="RxCxPARTS,...: run the whole product so, and as planned")
    args = parser.parse_args()
    m, n, k = args.shape
    if args.cuts is not None:
        asked = [sizes(text) for text in args.cuts.split(",") if text]
        for cut in (None, *asked):
            us, tile = microseconds(args.model, args.shape, args.transposes, cut=cut)
            source = "as planned" if cut is None else "asked for"
            print(f"{'x'.join(map(str, tile))} ({source}): {us:.1f} us a launch (predicted)")
        return
    high, wide = args.tile
    few, more = args.depths
    units = backend.machine(args.model).processors
    # The part of the product that is run: 16 rows of tiles, and enough columns for all compute
    # units.
    rows, columns = min(m, 16 * high), min(n, units // 16 * wide)
    short, long = (
        microseconds(args.model, [rows, columns, depth], args.transposes, (high, wide))[0]
        for depth in (few, more)
    )
    per_k = (long - short) / (more - few)
    rounds = math.ceil(math.ceil(m / high) * math.ceil(n / wide) / units)
    total = rounds * (short + per_k * (k - few))
    print(f"{rows}x{columns}: {few} deep {short:.1f} us, {more} deep {long:.1f} us (predicted)")
    print(
        f"{m}x{n}x{k} in {rounds} rounds: {total:.0f} us, {2 * m * n * k / total / 1e6:.0f} "
        "TFLOP/s (predicted, at the nominal clock)"
    )


if __name__ == "__main__":
    main()
