"""Runs all measurements of docs/several-gpus.md on a host with several GPUs, one after another:
`python bench/several_gpus.py --ranks 4 --machine h200 --row cuda-h200-x4 --out FOLDER`.

Prints a line for each figure, with its goal if there is one. The output of every command is stored
in the folder. With --row, the tests of that row of ci/matrix.toml run last (ci/evidence.py), which
writes a result file for ci/coverage.md. --config, --sizes, --layers and --only are for a trial on a
smaller machine, such as CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
KINDS = ("all_reduce", "all_gather", "all_to_all")
# Goals in microseconds, by machine, ranks and measurement.
GOALS = {
    ("h200", 4, "llama-3.2-1b"): 430.0,
    ("h200", 4, "llama-3.1-8b"): 1500.0,
    **{("h200", 4, f"all_reduce {n} auto"): 3.0 for n in (1 << 10, 16 << 10)},
    ("h200", 4, f"all_reduce {1 << 20} auto"): 9.0,
    ("h200", 4, f"all_reduce {256 << 20} auto"): 1100.0,
}


@dataclass(frozen=True)
class Step:
    """A command to run. figures: a function that is given the command's JSON report and yields
    (label, microseconds, details) for each line to print.
    """

    name: str
    words: tuple[str, ...]
    figures: Callable[[Any], Iterator[tuple[str, float, str]]] | None = None
    seconds: int = 600


def decoded(report: Any) -> Iterator[tuple[str, float, str]]:
    (row,) = report["figures"]
    yield "", row["us"], f"context {row['detail']['context']}"


def collected(report: Any) -> Iterator[tuple[str, float, str]]:
    for row in (figure["detail"] for figure in report["figures"]):
        beside = [f"{row['algorithm']}, wrong {row['wrong']}"]
        for name in ("predicted", "peer"):
            if row[f"{name}_seconds"] is not None:
                beside.append(f"{name} {1e6 * row[f'{name}_seconds']:.2f}")
        yield f"{row['collective']} {row['nbytes']}", 1e6 * row["seconds"], ", ".join(beside)


def stepped(report: Any) -> Iterator[tuple[str, float, str]]:
    for row in report["figures"]:
        yield row["detail"]["plan"], row["us"], f"{1 / row['ratio']:.3f} of the prediction"


def steps(args: argparse.Namespace) -> Iterator[Step]:
    ark, ranks = (sys.executable, "-m", "ark"), ("--ranks", str(args.ranks))
    on, links = ("--backend", args.backend), str(args.out / "links.json")
    comm = (*ark, "bench", "comm")
    sizes = ("--sizes", args.sizes, "--factor", "16", "--json", "-")
    predict = (sys.executable, str(ROOT / "bench/ranks.py"), *ranks, "--machine", args.machine)
    yield Step("predicted", (*predict, "--part", "decode"))
    for config in args.config or SHAPES:
        words = ("--config", config, *ranks, *on, "--context", str(args.context), "--json", "-")
        yield Step(f"decode {config}", (*ark, "bench", "decode", *words), decoded)
    peer = ("--vs", "gloo" if args.backend == "cpu" else "nccl")
    yield Step("comm", (*comm, *KINDS, *ranks, *on, *sizes, *peer), collected)
    yield Step("links", (*ark, "topo", "measure", *ranks, *on, "--out", links))
    for how in ("forestcoll", "ring"):
        fitted = ("--topology", links, "--algorithm", how)
        yield Step(how, (*comm, "all_reduce", *ranks, *on, *sizes, *fitted), collected)
    parallel = (*ark, "bench", "parallel", "--config", "llama-3.1-8b", *ranks, *on, "--json", "-")
    shape = ("--layers", str(args.layers), "--sequence", str(args.sequence))
    yield Step("plans", (*parallel, *shape, "--plan", "megatron,1f1b"), stepped)
    if args.ranks % 2 == 0 and args.ranks > 2:
        mesh = ("--plan", "1f1b+megatron", "--width", str(args.ranks // 2))
        yield Step("mesh", (*parallel, *shape, *mesh), stepped)
    if args.row:
        evidence = (sys.executable, str(ROOT / "ci/evidence.py"), args.row)
        yield Step("evidence", evidence, seconds=3600)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--machine", default="h200", help="as `ark info` names it: for predictions")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--row", help="of ci/matrix.toml")
    parser.add_argument("--out", type=Path, default=Path("several-gpus"), help="a folder")
    parser.add_argument("--config", action="append", help="in place of the 1B and 8B shapes")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--sizes", default="1K:256M")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--only", nargs="+", help="names of steps, or how they begin")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for step in steps(args):
        if args.only and not any(step.name.startswith(name) for name in args.only):
            continue
        try:
            done = subprocess.run(
                step.words, capture_output=True, text=True, timeout=step.seconds, check=False
            )
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired:
            code, out, err = 124, "", f"not done in {step.seconds} s"
        (args.out / f"{step.name.replace(' ', '-').replace('/', '-')}.txt").write_text(out + err)
        if code:
            failed += 1
            print(f"{step.name}: exit code {code}: {' '.join(err.split())[-300:]}", flush=True)
            continue
        if step.figures is None:
            print(f"{step.name}: {out.strip()}", flush=True)
            continue
        asked = step.name.removeprefix("decode ")
        for label, us, beside in step.figures(json.loads(out)):
            key = f"{label} auto" if step.name == "comm" else asked
            goal = GOALS.get((args.machine, args.ranks, key))
            reach = "" if goal is None else f", goal {goal:g}: {'met' if us <= goal else 'missed'}"
            print(f"{step.name} {label}".strip() + f": {us:.2f} us, {beside}{reach}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
