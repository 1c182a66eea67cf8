"""Counts the source that runs for a program, and the files and lines of the package `ark`.

`python ci/reading.py` prints the figures of docs/architecture.md. It plans each of a few programs
for an H200 and emits its source. Then it counts the files and lines of two things: the Python
functions that run for this program but not for a plain sum of two tensors, and the device headers
that are in this program's source but not in that of the sum.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.lower.ranks import plan_ranks
from ark.plan.serialize import machine_of

ROOT = Path(__file__).resolve().parents[1]
MACHINE, VENDOR = "h200", "cuda"
SOURCES = ("ark", f"backends/{VENDOR}")
ANY_FUNCTION = 0x2  # CO_NEWLOCALS, which the code of modules and classes lacks
PLAIN = "add"
PROGRAMS: dict[str, tuple[int, Callable[[int, int], object]]] = {
    "add": (1, lambda rank, world: _rows() + _rows()),
    "softmax": (1, lambda rank, world: ark.softmax(_rows())),
    "fused linear": (1, lambda rank, world: _gated_layer()),
    "all_reduce": (8, lambda rank, world: ark.all_reduce(_rows(), rank, world)),
}
TERMS = {"swiglu": r"\bswiglu\b", "a copy engine": r"\b(dma|DMA)\b", "fp8_e4m3": r"\bfp8_e4m3\b"}
EMULATOR = ROOT / "backends/rocm_emulator"  # omitted: its names are of instructions


def _rows() -> ark.Tensor:
    return ark.tensor([128, 4096], ark.bf16)


def _gated_layer() -> None:
    """A norm, two products by weights and a gated activation, which become one `linear` op. As in
    decoders, activations are fp32.
    """
    x = ark.rmsnorm(ark.tensor([1, 4096], ark.fp32), ark.parameter([4096], ark.bf16))
    gate, up = (ark.linear(x, ark.parameter([4096, 4096], ark.bf16)) for _ in range(2))
    ark.swiglu(gate, up)


def trace(name: str) -> dict[str, list[int]]:
    """The lines of all functions that run for a program, and of the headers, by file."""
    world, build = PROGRAMS[name]
    ran: set[CodeType] = set()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ran.add(frame.f_code)

    threading.setprofile(called)
    sys.setprofile(called)
    graphs = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            build(rank, world)
        graphs.append(model.graph)
    plan = plan_ranks(graphs, registry.machine(MACHINE), {"lockstep": world > 1})[0]
    text = ""
    for phases in plan.kernels:
        machine = machine_of(plan, phases[0])
        dialect = registry.with_kernels(registry.get(VENDOR)).dialect(machine.arch)
        text += write(plan, machine, dialect, phases).source.text
    sys.setprofile(None)
    lines: dict[str, set[int]] = defaultdict(set)
    for code in ran:
        path = Path(code.co_filename)
        numbers = [line for _, _, line in code.co_lines() if line]
        if code.co_flags & ANY_FUNCTION and any(path.is_relative_to(ROOT / f) for f in SOURCES):
            lines[str(path.relative_to(ROOT))] |= set(range(min(numbers), max(numbers) + 1))
    for path in (p for folder in SOURCES for p in (ROOT / folder).rglob("*.h")):
        if (header := path.read_text()).strip() in text:
            lines[str(path.relative_to(ROOT))] = set(range(len(header.splitlines())))
    return {path: sorted(numbers) for path, numbers in lines.items()}


def traced(name: str) -> dict[str, list[int]]:
    """Calls `trace` in a new process, in which nothing is cached."""
    command = [sys.executable, __file__, "--trace", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines: dict[str, list[int]] = json.loads(done.stdout)
    return lines


def own(lines: Mapping[str, Sequence[int]], plain: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """For each file, the number of lines that run for a program but not for the plain program."""
    counts = {path: len({*numbers} - {*plain.get(path, ())}) for path, numbers in lines.items()}
    return {path: count for path, count in counts.items() if count}


def sizes() -> dict[str, int]:
    """Counts of files, modules and lines, by a name of the count."""
    package = ROOT / "ark"
    entries = {p.stem for p in package.iterdir() if p.suffix == ".py" or p.is_dir()}
    paths = (p for folder in (package, ROOT / "backends") for p in folder.rglob("*.*"))
    texts = {p: p.read_text() for p in paths if p.suffix in (".py", ".pyi", ".h")}
    terms = {
        f"files that name {term}": sum(
            bool(re.search(pattern, text)) and not path.is_relative_to(EMULATOR)
            for path, text in texts.items()
        )
        for term, pattern in TERMS.items()
    }
    python = [t for p, t in texts.items() if p.suffix == ".py" and p.is_relative_to(package)]
    return {
        **terms,
        "Python lines in ark/": sum(len(text.splitlines()) for text in python),
        "modules of ark after `import ark`": _loaded_modules(""),
        "modules of ark after a first op": _loaded_modules("ark.relu(ark.tensor([4])); "),
        "public folders and modules directly under ark/": sum(
            not name.startswith("_") for name in entries
        ),
    }


def _loaded_modules(use: str) -> int:
    code = f"import sys, ark; {use}print(sum(m.partition('.')[0] == 'ark' for m in sys.modules))"
    command = [sys.executable, "-c", code]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", action="store_true", help="list each program's own files")
    parser.add_argument("--trace", choices=PROGRAMS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.trace:
        print(json.dumps(trace(args.trace)))
        return 0
    plain = traced(PLAIN)
    print(f"{PLAIN}: {len(plain)} files, {sum(map(len, plain.values())):,} lines")
    for name in [name for name in PROGRAMS if name != PLAIN]:
        counts = own(traced(name), plain)
        print(f"{name}: {len(counts)} files, {sum(counts.values()):,} lines of its own")
        if args.files:
            print("".join(f"  {path} {n}\n" for path, n in sorted(counts.items())), end="")
    for counted, size in sizes().items():
        print(f"{counted}: {size:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
