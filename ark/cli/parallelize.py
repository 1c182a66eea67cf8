"""`ark parallelize`: predicts how a model is split best over ranks, and prints text, JSON or a
picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

from ark import log
from ark.backend import machine_files
from ark.cli.common import from_script, write_file
from ark.cli.parser import Subparsers, flag, option, positive
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType, by_name
from ark.ir.graph import Graph
from ark.machine import Machine
from ark.models.build import whole_pass
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config
from ark.parallel.plans.auto import best
from ark.parallel.plans.predict import NAMES, predict
from ark.parallel.plans.prediction import Prediction, Target, Work
from ark.parallel.plans.splits import Splits
from ark.parallel.plans.work import Whole, whole_in

MOST_RANKS = 4096
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def register(subparsers: Subparsers) -> None:
    """Adds `ark parallelize`."""
    parser = subparsers.add_parser(
        "parallelize",
        help="predict how a model is best split over ranks",
        description="A plan names what each axis of the mesh does: a pipeline (1f1b, interleaved, "
        "zero-bubble, ...), copies of the model on other data (data, zero1, zero2, zero3, "
        "co-shard), or a way to split ops (megatron, sequence, column, row, expert, ...). A "
        "micro-batch is one sequence. Nothing is run.",
    )
    parser.set_defaults(func=run)
    parser.add_argument(
        "source",
        help="checkpoint directory, llama-3.1-70b ..., or a Python script that builds a model",
    )
    option(parser, "--mesh NxM", "ranks along each axis", required=True)
    option(parser, "--machine NAME", "machine model, for example h100", required=True)
    option(
        parser,
        "--plan NAME,...",
        f"one name an axis: {', '.join(NAMES)}; auto alone: the fastest of all (default)",
        default="auto",
    )
    flag(parser, "--keep-mesh", "of auto: keep the mesh's axes as given")
    option(parser, "--memory BYTES", "memory of a rank, as 80G (default: the machine's)")
    option(parser, "--batch N", "sequences of a step", positive, 64)
    option(
        parser,
        "--sequence N",
        "tokens of a sequence (default: the model's context, at most 4096)",
        positive,
    )
    flag(parser, "--inference", "without gradients and optimizer")
    flag(parser, "--recompute", "keep only the inputs of layers, and compute the rest again")
    option(parser, "--link-gbps N", "GB/s of a link within a host, one way", float, 450.0)
    option(parser, "--network-gbps N", "GB/s of a rank to other hosts", float, 50.0)
    option(parser, "--host-ranks N", "ranks of a host", positive, 8)
    flag(parser, "--json", "print one JSON object")
    option(parser, "--html FILE", "FILE for a page that shows the plan (default: none)")


def parse_mesh(text: str) -> tuple[int, ...]:
    """A mesh such as "2x4". Raises InvalidUsageError for other texts."""
    known = re.fullmatch(r"\d{1,5}(x\d{1,5}){0,3}", text)
    sizes = tuple(int(n) for n in text.split("x")) if known else ()
    if not sizes or not 1 <= math.prod(sizes) <= MOST_RANKS:
        raise InvalidUsageError(
            f"{text[:40]!r} is not a mesh; write 1 to 4 numbers as in 2x4, at most {MOST_RANKS} "
            "ranks"
        )
    return sizes


def parse_bytes(text: str) -> int:
    """A number of bytes such as 80G. Raises InvalidUsageError for other texts."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]?)B?", text)
    if not match or not float(match[1]):
        raise InvalidUsageError(f"{text[:40]!r} is not a number of bytes; write as in 80G")
    return int(float(match[1]) * UNITS[match[2]])


def run(args: argparse.Namespace) -> int:
    mesh, machine = parse_mesh(args.mesh), machine_files.machine(args.machine)
    memory = parse_bytes(args.memory) if args.memory else machine.memory_bytes or None
    for name in ("link_gbps", "network_gbps"):
        if not 1e-3 <= getattr(args, name) <= 1e9:
            raise InvalidUsageError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be 0.001 to 1e9"
            )
    target = Target(machine, args.link_gbps, args.network_gbps, args.host_ranks)
    work = Work(not args.inference, args.batch, args.recompute)
    splits = Splits(_graph(args, machine))
    names = tuple(args.plan.split(","))
    if names == ("auto",):
        keep = mesh if args.keep_mesh else None
        with log.slow("comparing plans"):
            prediction, _ = best(splits, math.prod(mesh), target, work, memory, keep)
    else:
        with log.slow(f"predicting {args.plan}"):
            prediction = predict(splits, mesh, names, target, work, memory)
    if args.html:
        from ark.parallel.page import render_page

        write_file(
            args.html, render_page(prediction, f"{Path(args.source).name} on {args.machine}")
        )
    if args.json:
        print(json.dumps(_object(prediction)))
    else:
        _show(prediction, memory)
    return 0


def _graph(args: argparse.Namespace, machine: Machine) -> Graph:
    """The graph of one forward pass over a sequence. The command line names a built-in model or a
    script that builds it.
    """
    source = str(args.source)
    if source.endswith(".py"):
        from ark.runtime.planner import graph_of_script

        return from_script(graph_of_script, source, machine)
    if Path(source).is_dir() or "/" in source:
        checkpoint = Checkpoint.open(source)
        config, dtype = checkpoint.config, DataType.from_numpy(checkpoint.dtype)
    else:
        config, dtype = builtin_config(source), by_name("bf16")
    rows = args.sequence or min(4096, config.max_position_embeddings)
    if rows > config.max_position_embeddings:
        raise InvalidUsageError(
            f"a sequence of {rows} tokens is too long; the model has "
            f"{config.max_position_embeddings} positions at most"
        )
    return whole_pass(config, dtype, rows)


def _work(prediction: Prediction) -> tuple[float, tuple[Whole, ...]]:
    """Describes how the work of a pipeline stage is divided among its ranks. Returns the fraction
    of the work that each rank computes, and the ops that are not divided but computed by every
    rank.
    """
    nodes = [node for cost in prediction.blocks for node in cost.block.nodes]
    return whole_in(
        nodes, prediction.options, [prediction.mesh[axis] for axis in prediction.axes] or [1]
    )


def _object(prediction: Prediction) -> dict[str, Any]:
    share, replicated = _work(prediction)
    return {
        "mesh": list(prediction.mesh),
        "plan": list(prediction.names),
        "recompute": prediction.work.recompute,
        "us": prediction.us,
        "bytes": prediction.peak,
        "memory": [dataclasses.asdict(m) for m in prediction.memory],
        "stages": list(prediction.stage_of),
        "gradients": {"bytes": prediction.synced_bytes, "us": prediction.synced_us},
        "send": {"bytes": prediction.send_bytes, "us": prediction.send_us},
        "update_us": prediction.update_us,
        "work": {"share": share, "replicated": [dataclasses.asdict(op) for op in replicated]},
        "blocks": [
            {
                "name": cost.block.name,
                "forward_us": cost.forward_us,
                "backward_us": cost.backward_us,
                "parameter_bytes": cost.parameter_bytes,
                "ops": [
                    {
                        "name": node.name,
                        "split": list(prediction.options[node.id].choice),
                        "layout": list(prediction.options[node.id].output),
                    }
                    for node in cost.block.nodes
                ],
                "moves": [
                    {**dataclasses.asdict(m), "backward": c.backward}
                    for c in cost.changes
                    for m in c.moves
                ],
            }
            for cost in prediction.blocks
        ],
    }


def _show(prediction: Prediction, memory: int | None) -> None:
    plan = " x ".join(
        f"{n} {name}" for n, name in zip(prediction.mesh, prediction.names, strict=True)
    )
    recomputing = ", recomputing" if prediction.work.recompute else ""
    print(f"{plan}{recomputing}: {prediction.us / 1e3:.1f} ms a step (predicted)")
    room = f" of {memory / 1e9:.1f}" if memory else ""
    for place, held in enumerate(prediction.memory):
        stage = f"stage {place}" if len(prediction.memory) > 1 else "each rank"
        print(
            f"{stage}: {held.total / 1e9:.1f} GB{room} (parameters {held.parameters / 1e9:.1f}, "
            f"gradients {held.gradients / 1e9:.1f}, optimizer {held.optimizer / 1e9:.1f}, "
            f"activations {held.activations / 1e9:.1f})"
        )
    layer = max(prediction.blocks, key=lambda b: len(b.block.nodes))
    moved = ", ".join(
        f"{m.op.replace('_', ' ')} {m.bytes / 1e6:.1f} MB" for c in layer.changes for m in c.moves
    )
    share, replicated = _work(prediction)
    several = math.prod(prediction.mesh[axis] for axis in prediction.axes)
    if several > 1:
        shares: dict[str, float] = {}
        for op in replicated:
            shares[op.type] = shares.get(op.type, 0.0) + op.share
        listed = ", ".join(
            f"{kind} {part:.1%}"
            for kind, part in sorted(shares.items(), key=lambda kept: -kept[1])[:3]
        )
        print(
            f"each of {several} ranks that split ops does {share:.1%} of the work; all of them "
            f"repeat {sum(shares.values()):.1%}{f' ({listed})' if listed else ''}"
        )
    print(f"{layer.block.name}: {layer.forward_us:.0f} us; moves {moved or 'nothing'}")
    print(
        f"{prediction.send_bytes / 1e6:.1f} MB between stages, {prediction.synced_bytes / 1e6:.1f} "
        "MB of gradients sent by a rank"
    )
