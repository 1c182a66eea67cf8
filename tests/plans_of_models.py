"""Compares every named parallel plan (a way to divide training among devices) with training on one
device, for six kinds of model (tests/cases/training_models.py).

`in_numpy` and `on_cpu_ranks` run two steps over ranks, in float64 and in fp32, and return the
largest difference of parameters and moments from torch's in float64. `python -m
tests.plans_of_models` runs all of them on CPU ranks. With `--write` it runs those that
docs/reference/parallel-plans.md lacks, and adds them to that page.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from ark.backend import registry
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize
from ark.parallel.pipeline.named import PIPELINES
from ark.parallel.plans.parallelize import Parallelized
from ark.parallel.plans.prediction import COPIES
from ark.parallel.plans.rules import PLANS
from ark.parallel.transform import View, part_of, parts_of
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.training_blocks import BLOCKS
from tests.cases.training_models import TRAINED_STEPS, Step, in_torch, step_of, values
from tests.ranks import run_ranks
from tests.unit.parallel.ranks_in_numpy import Ranks

PAGE = Path(__file__).parent.parent / "docs/reference/parallel-plans.md"
NAMES = tuple(dict.fromkeys((*PLANS, *COPIES, *PIPELINES)))
KINDS = tuple(BLOCKS)
RANKS = (2, 3, 4)
EXACT, FP32 = 1e-11, 2e-4
"""The largest permitted difference, relative to the largest element of a tensor: in float64 and in
fp32.
"""
Part = tuple[str, View, Any]
"""A buffer's name, the part of it that a rank holds, and the contents."""
LAYERS = {**dict.fromkeys(KINDS, 2), "Evoformer": 1, "encoder-decoder": 1}
MICRO_BATCHES = 4


def passes_of(plan: str) -> int:
    """The number of forward passes in a training step of a parallel plan."""
    return 3 if plan == "3f1b" else 1


def split(kind: str, plan: str, ranks: int) -> tuple[Step, Parallelized]:
    """Returns the training step on one device, and the ranks' graphs into which a parallel plan
    divides it.
    """
    step = step_of(kind, LAYERS[kind], gathered=plan == "zero3", passes=passes_of(plan))
    cuts = step.cuts if plan in PIPELINES or plan in COPIES else None
    micro_batches = MICRO_BATCHES if plan in PIPELINES else None
    return step, parallelize(step.graph, ranks, plan, cuts=cuts, micro_batches=micro_batches)


def _worst(step: Step, kind: str, plan: str, parts: Iterable[Part]) -> float:
    """The largest difference of the ranks' results from torch's. Raises AssertionError if a result
    is held by no rank.
    """
    want = in_torch(kind, LAYERS[kind], passes=passes_of(plan))
    worst, seen = 0.0, set()
    for buffer, view, actual in parts:
        name = step.names.get(buffer)
        if name in step.results:
            seen.add(name)
            part = part_of(want[name], view)
            scale = max(1e-30, np.abs(want[name]).max())
            worst = max(worst, float(np.abs(np.reshape(actual, part.shape) - part).max() / scale))
    assert seen == set(step.results), f"no rank holds {sorted(set(step.results) - seen)}"
    return worst


def in_numpy(kind: str, plan: str, ranks: int) -> float:
    """Runs the ranks' graphs in NumPy in float64. Returns the largest relative difference from
    torch.
    """
    step, result = split(kind, plan, ranks)
    given, memory = values(kind, LAYERS[kind]), Ranks(result.ranks.graphs)
    held = [(r, b, v) for r, held in enumerate(result.ranks.held) for b, v in held.items()]
    for rank, own in enumerate(result.ranks.held):
        for buffer, part in parts_of(own, step.names, given).items():
            memory.fill(rank, buffer, part)
    for _ in range(TRAINED_STEPS):
        memory.run()
    return _worst(step, kind, plan, [(b, v, memory.read(r, b)) for r, b, v in held])


def on_cpu_ranks(kind: str, plan: str, ranks: int, verified: bool = False) -> float:
    """Runs the ranks' graphs on CPU ranks in fp32. Returns the largest relative difference from
    torch. verified: the plans are verified before they run.
    """
    step, result = split(kind, plan, ranks)
    given = values(kind, LAYERS[kind])
    plans = plan_ranks(result.ranks.graphs, registry.machine("cpu-1"))
    if verified:
        verify(plans)
    backend, _ = registry.choose("cpu")

    def work(own: Any) -> list[Part]:
        held = result.ranks.held[own.rank]
        with Executor(
            plans[own.rank], backend, backend.open(0), ranks=own, budget_s=60.0
        ) as executor:
            for buffer, part in parts_of(held, step.names, given).items():
                executor.write(buffer, part)
            executor.start(TRAINED_STEPS).wait(600.0)
            parts = [(b, v, executor.read(b).copy()) for b, v in held.items() if step.names.get(b)]
            own.barrier()
            return parts

    return _worst(step, kind, plan, itertools.chain(*run_ranks(ranks, work)))


Rows = dict[tuple[str, str], dict[int, str]]
"""By kind of model and parallel plan: the largest difference as text for each number of ranks."""


def table(rows: Rows) -> str:
    """Returns the text of docs/reference/parallel-plans.md, with a row for each parallel plan."""
    lines = [
        "# Named plans on six kinds of model",
        "",
        "This page is for those who choose a plan. It has two training steps (AdamW) of six kinds "
        "of model on CPU ranks in fp32: the largest difference of a parameter or moment from "
        "torch's in float64 on one device, relative to the largest element of the tensor, on "
        f"{', '.join(map(str, RANKS[:-1]))} and {RANKS[-1]} ranks (-: not run). The first moment "
        f"is a tenth of the gradient. The limit is {FP32:g}; the same ranks interpreted in float64 "
        f"stay below {EXACT:g}. Written by `python -m tests.plans_of_models --write`; the models "
        "are in tests/cases/training_blocks.py.",
        "",
        f"| Plan | {' | '.join(KINDS)} |",
        "|---" * (len(KINDS) + 1) + "|",
    ]
    for plan in NAMES:
        cells = [
            " ".join(rows.get((kind, plan), {}).get(ranks, "-") for ranks in RANKS)
            for kind in KINDS
        ]
        lines.append(f"| `{plan}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def known() -> Rows:
    """Reads the results that docs/reference/parallel-plans.md already has."""
    rows: Rows = {}
    for line in PAGE.read_text().splitlines() if PAGE.exists() else ():
        plan, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if plan.strip("`") in NAMES and len(cells) == len(KINDS):
            for kind, cell in zip(KINDS, cells, strict=True):
                differences = zip(RANKS, cell.split(), strict=True)
                rows[kind, plan.strip("`")] = {r: text for r, text in differences if text != "-"}
    return rows


def _timed(exact: bool, kind: str, plan: str, ranks: int) -> tuple[float, float]:
    """The largest difference, and the seconds that the run took. exact: in float64."""
    begun = time.time()
    return (in_numpy if exact else on_cpu_ranks)(kind, plan, ranks), time.time() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--plans", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--numpy", action="store_true", help="interpret the ranks in float64")
    parser.add_argument(
        "--write", action="store_true", help=f"run what {PAGE.name} lacks, and enter it there"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    args = parser.parse_args()
    rows = known() if args.write else {}
    cases = [
        (kind, plan, ranks)
        for ranks, plan, kind in itertools.product(args.ranks, args.plans, args.kinds)
        if ranks not in rows.get((kind, plan), {})
    ]
    failed = []
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(_timed, args.numpy, *case): case for case in cases}
        for future in as_completed(running):
            kind, plan, ranks = running[future]
            try:
                worst, seconds = future.result()
            except Exception as error:
                failed.append((kind, plan, ranks))
                print(f"{kind} {plan} {ranks}: {type(error).__name__}: {error}", flush=True)
                continue
            if worst > (EXACT if args.numpy else FP32):
                failed.append((kind, plan, ranks))
            elif args.write:
                rows.setdefault((kind, plan), {})[ranks] = f"{worst:.0e}"
                PAGE.write_text(table(rows))
            print(f"{kind} {plan} {ranks}: {worst:.1e} ({seconds:.1f} s)", flush=True)
    print(f"{len(failed)} failed: {failed}" if failed else "all equal one rank's")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
