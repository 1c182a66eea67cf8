"""`ark export DIR|model.onnx|plan.json --backend NAME -o OUT`: writes a model as a C library."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from ark.backend import machine_files, registry
from ark.backend.protocol import Backend, SourceBackend
from ark.cli.common import memory_verdict, read_plan
from ark.cli.export.write import exporting, files, identifier, save
from ark.cli.parser import CONTEXT, Subparsers, add_backend, add_quantize, option, positive
from ark.cli.run import dimensions
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.plans import choose_chunk, choose_context, plans, usual_chunk

DEFAULT_CHUNK_TOKENS = 16  # prompt tokens per iteration, by default


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "export",
        help="write a model as a C library that needs no Python",
        description="Writes a C header, sources, the loop kernel as source and compiled, weights, "
        "a CMakeLists.txt and a program: of a checkpoint it generates tokens, of model.onnx it "
        "runs the network once.",
    )
    p.add_argument(
        "source", help="checkpoint directory, model.onnx, or plan.json (without weights)"
    )
    add_backend(p, required=True)
    option(
        p,
        "--arch NAME",
        "what the loop kernel is compiled for: the C++ compiler's -march (default: native), "
        "or a device's architecture",
        default="native",
    )
    option(p, "--machine NAME", "machine model to plan for (default: this machine's)")
    option(p, "--context N", CONTEXT, positive)
    option(
        p,
        "--chunk N",
        f"prompt tokens of an iteration (default: at most {DEFAULT_CHUNK_TOKENS})",
        positive,
    )
    add_quantize(p)
    option(
        p,
        "--dim NAME=N",
        "size of a symbolic dimension of model.onnx (default: none)",
        several=True,
    )
    option(p, "--name NAME", "the model's name in C (default: the source's)")
    option(p, "-o --output DIR", "folder for the library", required=True)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    backend = exporting(registry.get(args.backend))
    if not re.fullmatch(r"[A-Za-z0-9_.+-]{1,64}", args.arch):
        raise InvalidUsageError(
            f"--arch is {args.arch!r}; it must be a word that the C++ compiler's -march knows"
        )
    source = Path(args.source)
    name = identifier(source.resolve().stem, args.name)
    if args.dim and source.suffix != ".onnx":
        raise InvalidUsageError("--dim is for model.onnx")
    if source.suffix in (".json", ".onnx") and (args.context or args.chunk):
        raise InvalidUsageError("--context and --chunk are for checkpoints")
    if source.suffix == ".onnx":
        from ark.cli.export.network import network

        machine = machine_files.machine(args.machine or _machine(backend, args.arch))
        exported = network(source, dimensions(args.dim), machine)
        plan = exported.plan
        written = files(plan, backend, args.arch, name, network=exported)
    elif source.suffix == ".json":
        if args.machine:
            raise InvalidUsageError(
                "--machine is for models only; a plan file contains its machine"
            )
        plan = read_plan(args.source)
        written = files(plan, backend, args.arch, name)
    else:
        checkpoint = Checkpoint.open(args.source, args.quantize)
        machine = machine_files.machine(args.machine or _machine(backend, args.arch))
        context = choose_context(checkpoint, args.context)
        dtype = DataType.from_numpy(checkpoint.dtype)
        # An exported program has one kernel. Long chunks of a prompt may need another kernel
        # variant than single tokens, so the chunk is limited to a length that the kernel of single
        # tokens supports.
        chunk = choose_chunk(
            args.chunk, context, min(usual_chunk(machine, dtype), DEFAULT_CHUNK_TOKENS)
        )
        shape = Shape(checkpoint.config, dtype, context, chunk, 0, 1)
        plan = plans(shape, machine)[0]
        written = files(plan, backend, args.arch, name, checkpoint, shape)
    save(written, Path(args.output))
    for file, content in written.items():
        print(f"{Path(args.output, file)}: {len(content):,} bytes")
    return memory_verdict([plan])


def _machine(backend: Backend, arch: str) -> str:
    """The name of the machine model for an architecture. For the architecture `native` it is the
    backend's own name, which stands for this machine.
    """
    if not isinstance(backend, SourceBackend):
        for name in backend.machine_names():
            model = backend.machine(name)
            if model is not None and model.arch == arch:
                return name
        if arch != "native":
            raise InvalidUsageError(
                f"no machine model of {backend.name!r} has the architecture {arch!r}; name one "
                f"with --machine: {', '.join(backend.machine_names())}"
            )
        if backend.machine(backend.name) is None:
            raise InvalidUsageError(
                f"this machine has no device of {backend.name!r} to export for; name an "
                "architecture with --arch or a machine model with --machine: "
                f"{', '.join(backend.machine_names())}"
            )
    return backend.name
