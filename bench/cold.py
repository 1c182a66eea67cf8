"""Measures, without a device, the parts of the time before a decoder's first token on an empty
cache.

`python bench/cold.py [CONFIG] [--machine h100] [--chunk N]` plans, verifies, emits and compiles as
ark.models.generate does: other threads compile kernels from the moment the draft of the plan
exists. CPU seconds are valid on a busy machine, too; wall-clock seconds only on an idle machine
with two cores or more. Chunk 0 means decoding only; without --chunk, the default of `ark generate`
is used. With `--ops` instead of a config, it measures one graph with the ops of `ark bench ops`:
one op for each device function, without the sweep over sizes.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import tempfile
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ark.cli.measure.case import OpCase


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default="llama-3.2-1b")
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--ops", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ark-cold-") as folder:
        os.environ["ARK_CACHE_DIR"] = folder
        if args.ops:
            measure_ops(args.machine)
        else:
            measure(args.config, args.machine, args.chunk)


SQUARE = re.compile(r"matmul-(\d+)x\1x\1-(.*)")  # matches the name of a case with square matrices


def distinct(cases: Sequence[OpCase]) -> list[OpCase]:
    """One case for each device function. Of square products with the same types and transposes, and
    of the LSTMs, only the smallest case is kept.
    """
    cases_by_name: dict[str, OpCase] = {}
    for case in sorted(cases, key=lambda c: sum(map(math.prod, c.shapes))):
        square = SQUARE.fullmatch(case.name)
        name = (
            square[2] if square else case.name.split("-")[0] if "lstm" in case.name else case.name
        )
        cases_by_name.setdefault(name, case)
    return list(cases_by_name.values())


def measure_ops(machine_name: str) -> None:
    """Calls `measure` for one kernel that contains all ops of the chosen cases."""
    from ark.backend import registry
    from ark.backend.codegen.writer import write
    from ark.backend.protocol import Target
    from ark.cli.measure.cases import cases
    from ark.cli.measure.ops import input_type
    from ark.cli.measure.sweep.cases import SWEEP
    from ark.frontend.model import Model, use_model
    from ark.frontend.tensor import Tensor
    from ark.lower.pipeline import plan
    from ark.plan.serialize import machine_of

    machine = registry.machine(machine_name)
    backend = registry.get(machine.backend)
    chosen = distinct([c for c in cases() if c.fuse and not c.name.startswith(SWEEP)])
    model = Model()
    with use_model(model):
        for n, case in enumerate(chosen):
            tensor = model.graph.tensor
            names = [f"in{n}_{i}" for i in range(len(case.shapes))]
            inputs = [
                tensor(s, input_type(case, i), arena="state", name=names[i])
                for i, s in enumerate(case.shapes)
            ]
            case.build(*(Tensor(i, model) for i in inputs))
    start = time.process_time()
    made_plan = plan(model.graph, machine)
    print(f"{'plan':22} {time.process_time() - start:6.2f} CPU s, {len(chosen)} cases")
    for phases in made_plan.kernels:
        own = machine_of(made_plan, phases[0])
        emitted = write(made_plan, own, backend.dialect(machine.arch), phases)
        start, began = time.process_time(), time.monotonic()
        backend.compiler().compile(emitted.source, Target(machine.arch, own.threads))
        print(
            f"{'compile':22} {time.process_time() - start:6.2f} CPU s, "
            f"{time.monotonic() - began:6.2f} s, {len(emitted.bodies)} bodies, variant "
            f"{own.variant.name}"
        )


def measure(name: str, machine_name: str, chunk: int | None) -> None:
    """Plans, verifies, emits and compiles one program, and prints a line with the time of each of
    these parts.
    """
    began, cpu = time.monotonic(), time.thread_time()

    def tell(stage: str) -> None:
        nonlocal cpu
        now = time.thread_time()
        print(
            f"{stage:22} {now - cpu:6.2f} CPU s, {time.monotonic() - began:6.2f} s since it began"
        )
        cpu = now

    from ark.backend import registry
    from ark.ir.dtype import by_name
    from ark.lower.ranks import plan_ranks
    from ark.models.build import Shape, build
    from ark.models.config import builtin_config
    from ark.models.plans import usual_chunk
    from ark.plan.serialize import machine_of
    from ark.plan.types import Plan
    from ark.plan.verify import verify
    from ark.runtime import program

    machine = registry.machine(machine_name)
    backend = registry.get(machine.backend)
    compiler = type(backend.compiler())
    plain, compiled = compiler.compile, []

    def timed(self: Any, source: Any, target: Any) -> Any:
        start = time.thread_time()
        result = plain(self, source, target)
        compiled.append(time.thread_time() - start)
        return result

    compiler.compile = timed
    dtype = by_name("bf16")
    chunk = usual_chunk(machine, dtype) if chunk is None else chunk
    tell("imports")
    graph = build(Shape(builtin_config(name), dtype, 4096, chunk)).graph
    tell("graph")

    def drafted(rank: int, draft: Plan) -> None:
        tell("draft")
        program.begin(draft, backend, machine.arch)
        tell("emit")

    plans = plan_ranks([graph], machine, {"lockstep": True}, None, drafted)
    tell("schedule")
    verify(plans)
    tell("verify")
    for phases in plans[0].kernels:
        program.build(plans[0], machine_of(plans[0], phases[0]), backend, machine.arch, phases)
    tell("what was left")
    for seconds in compiled:
        print(f"{'compile a kernel':22} {seconds:6.2f} CPU s, in a thread of its own")
    print(
        f"in all {time.process_time():.2f} CPU s, {time.monotonic() - began:.2f} s, chunk {chunk}"
    )


if __name__ == "__main__":
    main()
