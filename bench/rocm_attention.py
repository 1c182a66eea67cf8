"""Predicts the times of attention over bf16 keys on an AMD GPU, for docs/rocm-timing.md.

The emulator takes a minute for 2^34 multiplications, so attention of many rows is not run whole.
Instead, as many tiles of queries as there are compute units are run at once, with two different
numbers of keys. The difference of the times, divided by the difference of the numbers, is the time
per key. The result is predicted, not measured.

    python bench/rocm_attention.py --heads 16 --width 128 --rows 8192
"""

from __future__ import annotations

import argparse
import contextlib
import math

import ark_rocm_emulator
import numpy as np
from ark_rocm import backend

from ark.ir.dtype import DataType, bf16, fp32
from ark.ir.graph import Graph
from ark.lower.pipeline import plan
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor


def planned(machine: Machine, kind: DataType, heads: int, width: int, rows: int, keys: int) -> Plan:
    """Plans attention of `rows` queries over `keys` keys. kind: the data type of queries and
    results. Keys and values are bf16.
    """
    graph = Graph()
    q = graph.tensor((rows, heads * width), kind, arena="state", name="q")
    k, v = (graph.tensor((heads, keys, width), bf16, arena="state", name=n) for n in "kv")
    out = graph.tensor((rows, heads * width), kind, name="out")
    attrs = {"heads": heads, "head_dim": width, "scale": width**-0.5}
    attrs |= {"causal": False, "placed": False}
    graph.add("attention", [q, k, v], [out], attrs, "attention")
    attention_plan = plan(graph, machine, {"fuse": False})
    verify([attention_plan])
    return attention_plan


def microseconds(
    model: str, units: int, kind: DataType, heads: int, width: int, keys: int, common: bool
) -> tuple[float, int]:
    """Runs attention with one tile of query rows per compute unit on the emulator. Returns the
    predicted microseconds and the number of rows of a tile.
    """
    random = np.random.default_rng(0)
    with ark_rocm_emulator.emulated(model), contextlib.closing(backend.open(0)) as device:
        machine = device.machine.with_processors(units)
        if common:
            machine = machine.without_capabilities(Capability.ATTENTION_UNITS)
        (op,) = planned(machine, kind, heads, width, 1 << 16, keys).ops
        high = int(op.params["rows"])
        attention_plan = planned(machine, kind, heads, width, units // heads * high, keys)
        assert attention_plan.ops[0].params["rows"] == high
        with Executor(attention_plan, backend, device) as executor:
            for name in "qkv":
                shape = next(t.shape for t in attention_plan.tensors if t.name == name)
                type_of = (kind if name == "q" else bf16).to_numpy()
                executor.write(name, random.standard_normal(shape).astype(type_of))
            run = executor.start(1)
            run.wait(3600)
            return run.elapsed_ms() * 1e3, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mi300x")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--keys", type=int, nargs=2, default=[512, 1024], help="two that are run")
    parser.add_argument("--units", type=int, help="compute units that run")
    parser.add_argument("--common", action="store_true", help="the common body instead")
    parser.add_argument("--fp32", action="store_true", help="queries and results of fp32")
    args = parser.parse_args()
    machine = backend.machine(args.model)
    units = (args.units or machine.processors) // args.heads * args.heads
    few, more = args.keys
    given = (args.model, units, fp32 if args.fp32 else bf16, args.heads, args.width)
    (short, high), (long, _) = (microseconds(*given, n, args.common) for n in (few, more))
    per_key = (long - short) / (more - few)
    tiles = args.heads * math.ceil(args.rows / high)
    total = tiles / machine.processors * (short + per_key * (args.rows - few))
    work = 4 * high * args.width * units / per_key * machine.processors / units / 1e6
    flops = 4 * args.heads * args.width * args.rows**2
    print(f"tiles of {high} rows: {few} keys {short:.1f} us, {more} keys {long:.1f} us (predicted)")
    print(
        f"the loop alone {work:.0f} TFLOP/s; {args.heads} x {args.width} of {args.rows} rows, all "
        f"keys: {total:.0f} us, {flops / total / 1e6:.0f} TFLOP/s (predicted, all units busy)"
    )


if __name__ == "__main__":
    main()
