"""Records one token of a decoder twice on a GPU: once the tasks of the loop kernel, and once the
kernels of a CUDA graph that torch.compile created from the same model.

`python bench/token_trace.py docs/pictures/token.json` writes the data that ci/picture.py draws.
Both runs read the same random weights. The loop kernel records the times of each task, which slows
it down a little; torch's profiler records the graph's kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from ark.backend import registry
from ark.cli.measure.decode import random_weights, to_torch
from ark.cli.measure.peer import TorchDecoder
from ark.cli.trace import measured_events
from ark.ir.dtype import bf16
from ark.models.build import Shape
from ark.models.config import builtin_config
from ark.models.plans import plans
from ark.models.sampling import GREEDY
from ark.models.sequences import write_sequences
from ark.runtime.executor import Executor

TRACE_RECORDS = 1 << 12  # per processor
TRACED_TOKENS = 12
SHOWN_PROCESSORS = 4  # processors in the picture


def loop_kernel(executor: Executor, shape: Any, context: int) -> list[list[Any]]:
    """The tasks of the token whose time is the median: [op, kind, processor, begin, end] of each.
    Times are in microseconds after the begin of the token's first task.
    """
    text = [i * 31 % 97 + 1 for i in range(context + 1)]
    for _ in range(2):
        write_sequences(executor, shape, [text], [len(text) + TRACED_TOKENS], GREEDY, (), context)
        executor.start(TRACED_TOKENS).wait()
    tokens: dict[int, list[dict]] = {}
    for event in measured_events(executor):
        if event["ph"] == "X":
            tokens.setdefault(event["args"]["iteration"], []).append(event)
    whole = [events for n, events in sorted(tokens.items())][1:-1]  # not the first and last
    starts = [min(e["ts"] for e in events) for events in whole]
    lengths = [b - a for a, b in itertools.pairwise(starts)]
    number = lengths.index(statistics.median_low(lengths))
    rows = []
    for e in whole[number]:
        if e["tid"] < SHOWN_PROCESSORS:
            begin = e["ts"] - starts[number]
            times = (round(begin, 2), round(begin + e["dur"], 2))
            rows.append([e["name"], e["cat"], e["tid"], *times])
    return rows


def cuda_graph(decoder: TorchDecoder, context: int) -> list[list[Any]]:
    """The kernels of the replay whose time is the median: [name, begin, end] of each. Times are in
    microseconds after the begin of the replay's first kernel.
    """
    with torch.inference_mode():
        tokens = torch.tensor([98], device="cuda")
        place = torch.tensor([context], device="cuda")
        step = torch.compile(decoder.step, fullgraph=True)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                step(tokens, place)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens.copy_(step(tokens, place))
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        replays = []
        for _ in range(5):
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                graph.replay()
                torch.cuda.synchronize()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "trace.json")
                profile.export_chrome_trace(str(path))
                events = json.loads(path.read_text())["traceEvents"]
            kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]
            start = min(e["ts"] for e in kernels)
            rows = [[e["name"][:60], e["ts"] - start, e["ts"] + e["dur"] - start] for e in kernels]
            replays.append(sorted(rows, key=lambda row: row[1]))
        lengths = [max(row[2] for row in rows) for rows in replays]
        chosen = replays[lengths.index(statistics.median_low(lengths))]
    return [[name, round(begin, 2), round(end, 2)] for name, begin, end in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--config", default="llama-3.2-1b")
    parser.add_argument("--context", type=int, default=512)
    args = parser.parse_args()
    backend, probe = registry.choose("cuda")
    device = backend.open(0)
    positions = args.context + 2 * TRACED_TOKENS
    shape = Shape(builtin_config(args.config), bf16, positions, 0)
    plan = plans(shape, device.machine)[0]
    try:
        with Executor(plan, backend, device, trace_records=TRACE_RECORDS) as executor:
            kept = {}
            for name, array in random_weights(plan, shape.config):
                executor.write(name, array)
                kept[name] = to_torch(array, "cuda")
            spans = loop_kernel(executor, shape, args.context)
        decoder = TorchDecoder(shape.config, kept, positions, "cuda")
        kernels = cuda_graph(decoder, args.context)
    finally:
        device.close()
    data = {
        "device": probe.devices[0].name,
        "config": args.config,
        "context": args.context,
        "processors": plan.processors,
        "spans": spans,
        "kernels": kernels,
    }
    args.output.write_text(json.dumps(data) + "\n")
    print(f"{len(spans)} tasks, {len(kernels)} kernels; wrote {args.output}")


if __name__ == "__main__":
    main()
