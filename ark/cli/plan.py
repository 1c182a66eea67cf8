"""`ark plan`: creates a plan without a device, or reads one from a file. Verifies, prints and
writes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ark.backend import machine_files
from ark.cli.common import (
    errors,
    from_script,
    memory_verdict,
    progress,
    read_plan,
    write_file,
)
from ark.cli.parser import (
    CHUNK,
    CONTEXT,
    Subparsers,
    add_kv_cache,
    add_quantize,
    flag,
    option,
    positive,
)
from ark.cli.pass_pages import PassPages
from ark.cli.plan_variants import variant_table
from ark.errors import InvalidUsageError
from ark.ir.dtype import DataType, by_name
from ark.lower.observe import observed
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import builtin_config, with_cache
from ark.models.gguf_file import is_gguf
from ark.models.holding import quantised_config
from ark.models.plans import choose_chunk, choose_context, make_plans, plans, usual_chunk
from ark.plan.dump import dump, summary
from ark.plan.serialize import to_json
from ark.plan.types import Plan
from ark.runtime.admission import admit


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "plan",
        help="make, read and check a plan without any device",
        description="Plans a checkpoint directory, a Python script that builds a model, or a "
        "built-in shape, for a machine model; or reads a plan file. The plan is verified.",
    )
    p.add_argument("source", help="checkpoint directory, script.py, plan.json, or llama-3.2-1b ...")
    option(
        p,
        "--machine NAME",
        "machine model, for example h100, mi300x or cpu-2, or a file with one, as "
        "`ark info --machine h100` prints it (required, but for a plan.json)",
    )
    option(p, "--ranks N", "tensor parallel ranks to plan for", positive, 1)
    option(p, "--context N", CONTEXT, positive)
    option(p, "--chunk N", f"{CHUNK}; 0: no prompts", int)
    add_quantize(p)
    add_kv_cache(p)
    option(
        p,
        "-o --output FILE",
        "FILE for the plan as JSON, of several ranks FILE.0.json and so on (default: "
        "a summary is printed)",
    )
    option(
        p,
        "--passes DIR",
        "folder for the graph after each pass that changed it, and a page (default: none)",
    )
    flag(
        p,
        "--variants",
        "predict each phase under every kernel variant of the machine, too; plans again for each",
    )
    flag(p, "--ops", "show every op, not a summary")
    flag(p, "--tasks", "show every op and every task")
    flag(p, "--json", "print the plan as JSON; of several ranks a list")
    p.set_defaults(func=run)


def read_plans(paths: list[str]) -> list[Plan]:
    """Reads plans from files and verifies them together."""
    planned = [read_plan(path) for path in paths]
    admit(planned)
    return planned


def make(args: argparse.Namespace, machine: Machine | None = None) -> list[Plan]:
    """The verified plans of all ranks that the command line describes. machine: if given, replaces
    the machine that the command line names.
    """
    under = "" if machine is None else f", variant {machine.variant.name}"
    source = str(args.source)
    if source.endswith(".json") and Path(source).is_file():
        return read_plans([source])
    if not args.machine:
        raise InvalidUsageError("name a machine model with --machine, for example cpu-2 or h100")
    machine = machine or machine_files.machine(args.machine)
    if source.endswith(".py"):
        from ark.runtime.planner import plan_script

        return from_script(plan_script, source, machine)
    if Path(source).is_dir() or "/" in source or is_gguf(source):
        checkpoint = Checkpoint.open(source, args.quantize, args.kv_cache_dtype)
        context = choose_context(checkpoint, args.context)
        config, dtype = checkpoint.config, DataType.from_numpy(checkpoint.dtype)
    else:
        config, dtype = builtin_config(source), by_name("bf16")
        config = quantised_config(config, args.quantize, source)
        config = with_cache(config, args.kv_cache_dtype, dtype)
        context = args.context or 1024
    chunk = choose_chunk(args.chunk, context, usual_chunk(machine, dtype))
    shape = Shape(config, dtype, context, chunk, 0, args.ranks)
    errors.print(f"planning {source} for {machine.name}{under}", style="dim", soft_wrap=True)
    return list(plans(shape, machine) if args.passes is None else make_plans(shape, machine))


def _watched(args: argparse.Namespace) -> list[Plan]:
    """Creates the plans and, if `--passes` is given, writes the folder with the graph after each
    pass.
    """
    if str(args.source).endswith(".json"):
        raise InvalidUsageError("--passes shows how a model is planned; a plan file has no passes")
    pages = PassPages()
    with observed(pages):
        planned = make(args)
    page = pages.write(args.passes, f"{args.source} on {args.machine}")
    print(f"wrote {page}: {len(pages.changes)} passes changed the graph", file=sys.stderr)
    return planned


def run(args: argparse.Namespace) -> int:
    if args.variants and (args.json or str(args.source).endswith(".json")):
        raise InvalidUsageError(
            "--variants plans a model again and prints a table: name a model and omit --json"
        )
    with progress(args.json) as tell:
        tell("planning", 0, 0)
        planned = _watched(args) if args.passes is not None else make(args)
        texts = [to_json(plan) for plan in planned] if args.output or args.json else []
    if args.output:
        for plan, text in zip(planned, texts, strict=True):
            path = Path(args.output)
            name = path if len(planned) == 1 else path.with_suffix(f".{plan.rank}{path.suffix}")
            write_file(str(name), text)
            print(f"wrote {name}: {len(text):,} bytes", file=sys.stderr)
    if args.json:
        sys.stdout.write(texts[0] if len(planned) == 1 else "[" + ",\n".join(texts) + "]\n")
    elif not args.output or args.ops or args.tasks:
        sys.stdout.write(_shown(planned, args.ops, args.tasks))
    if args.variants:
        machine = machine_files.machine(args.machine)
        with progress(False) as tell:
            tell("planning under each variant", 0, 0)
            table = variant_table(planned[0], machine, lambda under: make(args, under))
        sys.stdout.write(table)
    return memory_verdict(planned)


def _shown(planned: Sequence[Plan], ops: bool, tasks: bool) -> str:
    """The plans as text. If all ranks have equal summaries, only that of the first rank is
    shown.
    """
    if ops or tasks:
        return "".join(dump(plan, tasks) for plan in planned)
    alike: dict[str, list[int]] = {}
    for plan in planned:
        alike.setdefault(summary(plan).partition("\n")[2], []).append(plan.rank)
    parts = []
    for text, ranks in alike.items():
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        parts.append(f"plan of {named} of {planned[0].world_size}\n{text}")
    return "".join(parts)
