"""Predicts the times of the gated block of a decoder's layer on an AMD GPU (norm, the projections
gate, up and down, and the residual sum), for docs/rocm-timing.md, by number of input rows and type
of weights.

Two launches have different numbers of such blocks in sequence. The difference of their times is the
time of the additional blocks. The result is predicted, not measured.

    python bench/rocm_layer.py --shape 2048x8192 --rows 1,8,16 --weights bf16,fp8,mxfp4
"""

from __future__ import annotations

import argparse
import contextlib

import ark_rocm_emulator
import numpy as np
from ark_rocm import backend

from ark.ir.dtype import DataType, bf16, fp4, fp8_e4m3, fp32, int4, int8, row_type
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor


def row_of(name: str, k: int) -> DataType:
    """The data type of weights with `k` columns in a format. Of a quantised matrix it is a row
    type: codes and scales of a whole row are one element.
    """
    return {
        "bf16": bf16,
        "fp8": row_type(fp8_e4m3, k, k, fp32, False, bf16),
        "int8": row_type(int8, k, k, fp32, False, bf16),
        "int4": row_type(int4, k, 32, bf16, False, bf16),
        "mxfp4": row_type(fp4, k, 32, bf16, False, bf16),
    }[name]


def planned(machine: Machine, name: str, rows: int, width: int, inner: int, blocks: int) -> Plan:
    graph = Graph()
    x = graph.tensor((rows, width), fp32, arena="state", name="x")
    norm = {"prologue": "rmsnorm", "eps": 1e-5, "epilogue": "swiglu"}
    add = {"prologue": "none", "epilogue": "add"}
    for block in range(blocks):
        sides = {"gate": (2 * inner, width), "down": (width, inner)}
        gate, down = (
            graph.tensor(sides[s], row_of(name, sides[s][1]), arena="parameter", name=f"{s}{block}")
            for s in sides
        )
        factors = graph.tensor((width,), fp32, arena="parameter", name=f"norm{block}")
        middle = graph.tensor((rows, inner), fp32, name=f"middle{block}")
        last = {"arena": "state"} if block == blocks - 1 else {}
        y = graph.tensor((rows, width), fp32, name=f"y{block}", **last)
        graph.add("linear", [x, gate, factors], [middle], norm, f"gate{block}")
        graph.add("linear", [middle, down, x], [y], add, f"down{block}")
        x = y
    done = plan(graph, machine)
    verify([done])
    return done


def microseconds(model: str, name: str, rows: int, width: int, inner: int, blocks: int) -> float:
    """Runs the given number of gated blocks in sequence once on the emulator. Returns the predicted
    microseconds.
    """
    with ark_rocm_emulator.emulated(model), contextlib.closing(backend.open(0)) as device:
        program = planned(device.machine, name, rows, width, inner, blocks)
        with Executor(program, backend, device) as executor:
            executor.write("x", np.random.default_rng(0).standard_normal((rows, width), np.float32))
            run = executor.start(1)
            run.wait(3600)
            return run.elapsed_ms() * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mi300x")
    parser.add_argument("--shape", default="2048x8192", help="width x inner width")
    parser.add_argument("--rows", default="1,8,16")
    parser.add_argument("--weights", default="bf16,fp8,int4,mxfp4")
    parser.add_argument("--blocks", type=int, nargs=2, default=[1, 3], help="two numbers that run")
    args = parser.parse_args()
    width, inner = map(int, args.shape.split("x"))
    few, more = args.blocks
    for name in args.weights.split(","):
        first = 0.0
        for rows in map(int, args.rows.split(",")):
            short, long = (
                microseconds(args.model, name, rows, width, inner, blocks) for blocks in (few, more)
            )
            each = (long - short) / (more - few)
            first = first or each
            print(
                f"{name}, {rows} rows: {each:.1f} us a block, {each / first:.2f} of the first "
                f"(predicted; {few} and {more} blocks take {short:.1f} and {long:.1f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
