"""Predicts, without a GPU, the times of programs on several GPUs of one host:
`python bench/ranks.py --ranks 4 --machine h100 [--part decode|collectives|stages] [--compile]`.

The cases are decoders of 1B and 8B parameters, every collective at several sizes, and the 8B
decoder in two pipeline stages whose ops are split over ranks. Each case is planned for all ranks,
verified, emitted and, with --compile, compiled. Nothing is run. Prints a line with the predicted
time for each case. Decoders are predicted by ark.plan.cost (which assumes that peers answer at
once), collectives by ark.collective.simulate for the links of one host, and stages by ark.parallel.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence

from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.backend.protocol import Target
from ark.cli.measure.parallel import ParallelCase, graphs, predicted
from ark.collective.programs import Collective
from ark.collective.simulate import simulate
from ark.collective.topology import TYPICAL, load
from ark.distributed.calls import Key, algorithm, plans_for
from ark.ir.dtype import bf16
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.plans import make_plans
from ark.ops.communication.collectives import choose_program
from ark.plan.cost import predict
from ark.plan.serialize import machine_of
from ark.plan.types import Plan
from ark.plan.verify import verify

SIZES = (1 << 10, 16 << 10, 1 << 20, 256 << 20)
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def kernels(plans: Sequence[Plan], compiled: bool) -> str:
    """A text with the number of distinct kernels of the ranks and, if they are compiled, their
    total size.
    """
    sizes: dict[str, int] = {}
    for plan in plans:
        for phases in plan.kernels:
            machine = machine_of(plan, phases[0])
            backend = registry.with_kernels(registry.get(machine.backend))
            text = write(plan, machine, backend.dialect(machine.arch), phases).source
            name = repr(text)
            if name not in sizes:
                target = Target(machine.arch, machine.threads)
                compiler = backend.compiler()
                sizes[name] = len(compiler.compile(text, target).data) if compiled else 0
    return f"{len(sizes)} kernels" + (
        f" compiled to {sum(sizes.values())} bytes" if compiled else ""
    )


def decoders(machine: Machine, ranks: int, compiled: bool) -> Iterator[str]:
    for name in ("llama-3.2-1b", "llama-3.1-8b"):
        plans = make_plans(Shape(builtin_config(name), bf16, 2048, 0, 0, ranks), machine)
        spans = predict(plans[0], len(plans[0].phases) - 1)
        variant = plans[0].variant
        us = max(s.end for s in spans)
        yield f"{name}, {variant}: {us:.0f} us a token predicted; {kernels(plans, compiled)}"


def collectives(machine: Machine, ranks: int, compiled: bool) -> Iterator[str]:
    topology = load(f"{machine.name}:gpus={ranks}")
    for kind, nbytes in ((k, n) for k in KINDS for n in SIZES):
        reduces = Collective(kind).reduces
        elements = nbytes // 4 // (ranks if kind == Collective.ALL_GATHER else 1)
        root = 0 if kind == Collective.BROADCAST else None
        key = Key(
            kind, "fp32" if reduces else "uint32", 4, elements, "sum" if reduces else None, root
        )
        how = algorithm(key, ranks)
        program = choose_program(kind, ranks, how, None, root, key.reduction)
        us = simulate(program, topology, nbytes, TYPICAL).time_us
        sizes = kernels(plans_for(key, ranks, machine), compiled)
        yield f"{kind} of {nbytes >> 10} KB, {how}: {us:.2f} us predicted; {sizes}"


def stages(machine: Machine, ranks: int, compiled: bool) -> Iterator[str]:
    config = dataclasses.replace(builtin_config("llama-3.1-8b"), num_hidden_layers=8)
    case = ParallelCase(config, bf16, "1f1b+megatron", 512, 8, 450.0, width=ranks // 2)
    prediction = predicted(case, ranks, machine)
    plans = plan_ranks(graphs(case, ranks, machine, prediction), machine)
    verify(plans)
    yield (
        f"llama-3.1-8b, 8 layers, 8 x 512 tokens, 2 stages of {ranks // 2}: {prediction.us:.0f} us "
        f"a step predicted; {kernels(plans, compiled)}"
    )


PARTS = {"decode": decoders, "collectives": collectives, "stages": stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--machine", default="h100")
    parser.add_argument("--part", action="append", choices=sorted(PARTS))
    parser.add_argument("--compile", action="store_true")
    args = parser.parse_args()
    for part in args.part or PARTS:
        start = time.process_time()
        for line in PARTS[part](registry.machine(args.machine), args.ranks, args.compile):
            used = time.process_time() - start
            print(f"{args.ranks} x {args.machine}: {line}; {used:.1f} CPU s", flush=True)
            start = time.process_time()


if __name__ == "__main__":
    main()
