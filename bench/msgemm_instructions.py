"""Counts the instructions of the methods of examples/msgemm: multiplication, and table look-up for
each number d of weights per table entry. Counts either the instructions that an emulated gfx942
executes, or those in the machine code for an H100.

    ARK_ROCM_DEVICE=emulated:gfx942 python -m bench.msgemm_instructions
    python -m bench.msgemm_instructions --sass          needs nvdisasm (CUDA's toolkit)

Executed instructions are the wave-instructions of an iteration: a quarter of the difference between
five iterations and one. The kernel has one processor, so that no processor polls. In machine code,
the innermost loop with the most instructions of the op's kind is taken for each op, and its
instructions are divided by its products (a weight times an element of a column).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ark
from examples.msgemm import msgemm

Build = Callable[[], tuple[Any, dict[Any, np.ndarray]]]
LABEL = re.compile(r"^(\.L_\w+):")
CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9.]*)(.*)")
WIDTHS = {"64": 2, "128": 4}  # elements that one instruction moves


def methods(rows: int, k: int, columns: int) -> dict[str, Build]:
    """The programs of the methods, by the method's name. Each multiplies weights (rows, k),
    quantised in groups of 48, by x (k, columns).
    """
    weight, x, scales = msgemm.draw(rows, k, columns, 48)
    methods_by_name = {"multiplied": msgemm.by_multiplying(weight, x, scales)}
    methods_by_name |= {
        f"tables, d = {d}": msgemm.by_tables(weight, x, d, scales) for d in (1, 2, 3)
    }
    return methods_by_name


def executed(build: Build) -> float:
    """The wave-instructions of an iteration."""
    import ark_rocm_emulator as emulator

    ark.Model.reset()
    with ark.PlannerContext(processor_range=[0, 1]):
        _, given = build()
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for tensor, array in given.items():
            tensor.from_numpy(array)
        seen = []
        for iterations in (1, 1, 5):
            runtime.run(iterations)
            seen.append(emulator.instructions()[0])
    return (seen[2] - 2 * seen[1] + seen[0]) / 4


def loops(sass: str) -> list[list[str]]:
    """The opcodes of each innermost loop in a listing by nvdisasm."""
    codes: list[str] = []
    labels: dict[str, int] = {}
    ends: list[tuple[int, str]] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(codes)
        elif code := CODE.search(line):
            if code[1] == "BRA" and (target := re.search(r"\.L_\w+", code[2])):
                ends.append((len(codes), target[0]))
            codes.append(code[1])
    spans = [(labels[to], end) for end, to in ends if labels.get(to, end + 1) <= end]
    inner = [s for s in spans if not any(s != o and s[0] <= o[0] and o[1] <= s[1] for o in spans)]
    return [codes[begin : end + 1] for begin, end in inner]


def elements(loop: list[str], kind: str) -> int:
    """The number of elements that one iteration of a loop processes with instructions of the given
    kind, such as loads.
    """
    memory_codes = (code.split(".") for code in loop if code.split(".")[0] in kind.split())
    return sum(max((WIDTHS.get(part, 1) for part in code), default=1) for code in memory_codes)


def compiled(build: Callable[[], Any], kind: str) -> float:
    """Instructions per element in the H100 loop with the most instructions of a kind."""
    from ark_cuda import backend, machines

    from ark.frontend.model import Model
    from ark.lower.pipeline import plan
    from ark.runtime.program import build as program

    ark.Model.reset()
    held = build()
    machine = machines.MODELS["h100"]
    kernel = program(plan(Model.get_model().graph, machine), machine, backend, "sm_90a")
    del held
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.binary.data)
        disassembly = subprocess.run(["nvdisasm", "-c", file.name], check=True, capture_output=True)
    loop = max(loops(disassembly.stdout.decode()), key=lambda codes: elements(codes, kind))
    return len(loop) / elements(loop, kind)


def in_sass(rows: int, k: int, columns: int) -> dict[str, float]:
    """Instructions per product (a weight times a column), by method: those of its loops, plus a
    share of the instructions that compute a table's entries.
    """

    def table(d: int) -> Any:
        return msgemm.tables(ark.tensor([k, columns]), ark.tensor([1, 16, 1]), d)

    def sums(d: int) -> Any:
        apart = ark.tensor([rows, k // 48, 48 // d, columns])
        return ark.reduce_sum(apart, 2)

    def looked_up(d: int) -> Any:
        ids = ark.tensor([rows, k // d], ark.int32)
        return ark.gather(ark.tensor([k // d * 16**d, columns]), ids)

    multiplied = methods(rows, k, columns)["multiplied"]
    counts = {"multiplied": compiled(multiplied, "FFMA")}
    for d in (1, 2, 3):
        entry = compiled(partial(looked_up, d), "ST STG") + compiled(partial(sums, d), "FADD")
        per_row = compiled(partial(table, d), "ST STG") * 16**d / rows
        counts[f"tables, d = {d}"] = (entry + per_row) / d
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--k", type=int, default=192)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--sass", action="store_true")
    args = parser.parse_args()
    if args.sass and not shutil.which("nvdisasm"):
        parser.error("nvdisasm is not found; it is a part of CUDA's toolkit")
    ark.init(backend="cpu" if args.sass else "rocm")
    shape = args.rows, args.k, args.columns
    if args.sass:
        print(json.dumps({name: round(n, 2) for name, n in in_sass(*shape).items()}))
        return
    for name, build in methods(*shape).items():
        count = executed(build)
        each = 64 * count / np.prod(shape)
        print(
            json.dumps({"method": name, "wave_instructions": count, "of_a_product": round(each, 2)})
        )


if __name__ == "__main__":
    main()
