"""`ark trace`: writes a Chrome/Perfetto JSON file with two tracks for each processor: the planned
and the measured timeline.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from ark.backend import registry
from ark.cli.common import write_file
from ark.cli.parser import (
    CONTEXT,
    Subparsers,
    add_backend,
    add_device,
    add_quantize,
    option,
    positive,
)
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.tokenizer import Tokenizer
from ark.plan.cost import predict
from ark.plan.types import Plan, Task
from ark.runtime.executor import Executor


def register(subparsers: Subparsers) -> None:
    p = subparsers.add_parser(
        "trace",
        help="draw a plan's planned and measured timeline",
        description="Generates a few tokens and writes what every processor did, and when, beside "
        "the plan's prediction, for chrome://tracing or ui.perfetto.dev.",
    )
    p.add_argument("directory", help="a checkpoint directory")
    option(p, "-o --output FILE", "FILE for the trace, as JSON", required=True)
    option(p, "--prompt TEXT", "text to continue", default="The")
    option(p, "--max-new-tokens N", "tokens to make, at most", positive, 4)
    option(p, "--context N", CONTEXT, positive)
    add_quantize(p)
    add_backend(p)
    add_device(p)
    p.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    checkpoint = Checkpoint.open(args.directory, args.quantize)
    tokenizer = Tokenizer.open(args.directory, vocab_size=checkpoint.config.vocab_size)
    prompt = tokenizer.encode(args.prompt)
    backend, probe = registry.choose(args.backend)
    device = backend.open(args.device)
    try:
        with Generator(
            checkpoint, backend, device, context=args.context, trace_records=1 << 16
        ) as generator:
            for _ in generator.stream(prompt, args.max_new_tokens):
                pass
            events = planned_events(generator.executor.plan)
            assert isinstance(generator.executor, Executor)  # only an Executor can record traces
            events += measured_events(generator.executor)
    finally:
        device.close()
    data = {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"device": probe.devices[args.device].name, "notes": list(probe.notes)},
    }
    write_file(args.output, json.dumps(data) + "\n")
    print(f"{args.output}: {len(events)} events; open it in ui.perfetto.dev")
    return 0


def _event(
    plan: Plan, task: Task, pid: int, processor: int, begin: float, end: float
) -> dict[str, Any]:
    op = plan.ops[task.op]
    return {
        "name": op.name,
        "cat": op.kind,
        "ph": "X",
        "pid": pid,
        "tid": processor,
        "ts": begin,
        "dur": max(end - begin, 0.001),
        "args": {"tile": list(task.coord)},
    }


def _named(pid: int, label: str, processors: int) -> list[dict[str, Any]]:
    names: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": label}}
    ]
    names += [
        {"name": "thread_name", "ph": "M", "pid": pid, "tid": i, "args": {"name": f"processor {i}"}}
        for i in range(processors)
    ]
    return names


def planned_events(plan: Plan) -> list[dict[str, Any]]:
    """The predicted timelines of all phases, one after the other, as trace events."""
    events = _named(0, "planned (one iteration of each phase)", plan.processors)
    start = 0.0
    for number in range(len(plan.phases)):
        spans = predict(plan, number)
        events += [
            _event(plan, s.task, 0, s.processor, start + s.begin, start + s.end) for s in spans
        ]
        start += max((s.end for s in spans), default=0.0)
    return events


def measured_events(executor: Executor) -> list[dict[str, Any]]:
    """The records of the last run as trace events, in microseconds from the first record."""
    plan = executor.plan
    rows = executor.trace()
    first = min((int(r["begin"].min()) for r in rows if len(r)), default=0)
    events = _named(1, "measured", plan.processors)
    for processor, row in enumerate(rows):
        for record in row:
            _, _, task = executor.tables.listing[int(record["task"])]
            begin = (int(record["begin"]) - first) / 1e3
            end = (int(record["end"]) - first) / 1e3
            event = _event(plan, task, 1, processor, begin, end)
            event["args"]["iteration"] = int(record["iteration"])
            events.append(event)
    return events
