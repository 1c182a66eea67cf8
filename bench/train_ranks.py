"""Times training steps of GPT-2 (Radford et al., 2019; 124 M parameters) on several ranks under a
parallel plan, beside torch's DistributedDataParallel compiled by inductor:

    python -m bench.train_ranks --ranks 2 --backend cuda

ark and torch use fp32 parameters and moments, bf16 products, an fp32 residual stream, the same
initial parameters and the same random tokens. ark's step is one iteration of a launch: forward and
backward pass, sums of gradients over ranks, and AdamW. torch's is a compiled forward and backward
pass under autocast, an all-reduce of gradients in buckets, and AdamW(fused=True). `losses` are
those of the first steps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.parallel import parallelize
from ark.parallel.transform import RankGraphs, parts_of
from ark.plan.serialize import from_json, to_json
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from ark.runtime.session import device, ranks
from bench.over_ranks import join, slowest

RATE, BETAS, EPS, DECAY, DEVIATION = 1e-3, (0.9, 0.95), 1e-8, 0.1, 0.02
MASKED_SCORE = -1e9  # of scores, above the diagonal


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT-2. vocabulary: rounded up to a multiple of 128. batch: the number of texts
    of a step, over all ranks.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304
    rows: int = 512
    batch: int = 16

    @property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        w = self.width
        sizes: dict[str, tuple[int, ...]] = {
            "table": (self.vocabulary, w),
            "places": (self.rows, w),
        }
        for i in range(self.layers):
            sizes |= {
                f"{i}.{name}": (w,) for name in ("norm", "shift", "norm2", "shift2", "out_bias")
            }
            sizes |= {f"{i}.{name}": (w, w) for name in ("query", "key", "value", "out")}
            sizes |= {f"{i}.{name}_bias": (w,) for name in ("query", "key", "value", "down")}
            sizes |= {f"{i}.up": (4 * w, w), f"{i}.up_bias": (4 * w,), f"{i}.down": (w, 4 * w)}
        return {**sizes, "norm": (w,), "shift": (w,)}


def starts(shape: Shape) -> dict[str, np.ndarray]:
    """The initial parameters by name."""
    random = np.random.default_rng(1)
    values = {}
    for name, size in shape.parameters.items():
        if len(size) == 1:
            values[name] = np.full(size, float("norm" in name), np.float32)
        else:
            values[name] = random.standard_normal(size, np.float32) * np.float32(DEVIATION)
    return values


def texts(shape: Shape) -> np.ndarray:
    """The tokens of a step, of all ranks (batch, rows + 1)."""
    return np.random.default_rng(2).integers(0, shape.vocabulary, (shape.batch, shape.rows + 1))


class Step:
    """A training step on one device as a graph. names: for each buffer, the name of the parameter
    or other array that it holds.
    """

    def __init__(self, shape: Shape, offload: bool) -> None:
        self.shape, model = shape, Model(0, 1)
        with use_model(model):
            self.given = {n: ark.parameter(s, name=n) for n, s in shape.parameters.items()}
            ids, targets = (ark.tensor([shape.batch, shape.rows], ark.int32) for _ in range(2))
            mask = ark.tensor([shape.rows, shape.rows], ark.bf16)
            kept = ark.tensor([1])
            loss = self._loss(ids, targets, mask)
            weights = list(self.given.values())
            gradients = ark.grad(loss, weights)
            ark.optim.AdamW(weights, RATE, BETAS, EPS, DECAY, offload).step(gradients)
            ark.copy(loss, output=kept)
        self.graph: Graph = model.graph
        named = {**self.given, "ids": ids, "targets": targets, "mask": mask, "loss": kept}
        self.names = {t.ir.buffer.name: n for n, t in named.items()}
        self.cuts = {t.ir.buffer.name: 0 for t in (ids, targets)}

    def _half(self, name: str) -> Any:
        return ark.cast(self.given[name], ark.bf16)

    def _linear(self, x: Any, name: str) -> Any:
        y = ark.matmul(x, self._half(name), transpose_other=True)
        return ark.add(y, self._half(f"{name}_bias"))

    def _normed(self, h: Any, norm: str, shift: str) -> Any:
        scaled = ark.mul(ark.layernorm(h, 1e-5), self.given[norm])
        return ark.cast(ark.add(scaled, self.given[shift]), ark.bf16)

    def _loss(self, ids: Any, targets: Any, mask: Any) -> Any:
        s = self.shape
        count, head = s.batch * s.rows, s.width // s.heads
        h = ark.add(ark.embedding(ids, self.given["table"]), self.given["places"])
        h = ark.reshape(h, [count, s.width])
        for i in range(s.layers):
            x = self._normed(h, f"{i}.norm", f"{i}.shift")
            query, key, value = (
                ark.transpose(
                    ark.reshape(self._linear(x, f"{i}.{n}"), [s.batch, s.rows, s.heads, head]),
                    [0, 2, 1, 3],
                )
                for n in ("query", "key", "value")
            )
            scores = ark.mul(ark.matmul(query, key, transpose_other=True), 1 / math.sqrt(head))
            mixed = ark.matmul(ark.softmax(ark.add(scores, mask)), value)
            mixed = ark.reshape(ark.transpose(mixed, [0, 2, 1, 3]), [count, s.width])
            h = ark.add(h, ark.cast(self._linear(mixed, f"{i}.out"), ark.fp32))
            x = self._normed(h, f"{i}.norm2", f"{i}.shift2")
            inner = ark.gelu(self._linear(x, f"{i}.up"))
            h = ark.add(h, ark.cast(self._linear(inner, f"{i}.down"), ark.fp32))
        x = self._normed(h, "norm", "shift")
        logits = ark.matmul(x, self._half("table"), transpose_other=True)
        return ark.cross_entropy(logits, ark.reshape(targets, [count]))


def own_plan(result: RankGraphs, rank: int, machine: Machine, args: argparse.Namespace) -> Plan:
    """The rank's plan, verified together with those of the other ranks. With --plans FOLDER, the
    plan is read from FOLDER if it is stored there, and otherwise made and stored there.
    """
    kept = args.plans and args.plans / f"{args.plan}.{rank}.json"
    if kept and kept.exists():
        return from_json(kept.read_text())
    plans = plan_ranks(result.graphs, machine)
    if not args.unverified:
        verify(plans)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(to_json(plans[rank]))
    return plans[rank]


def in_ark(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step on this rank, bytes of its device, and the losses of the first steps."""
    job, chosen = ranks(), device()
    assert job is not None
    begun = time.perf_counter()
    step = Step(shape, args.offload)
    result = parallelize(step.graph, job.world_size, args.plan, cuts=step.cuts).ranks
    plan = own_plan(result, job.rank, chosen.machine, args)
    planned = time.perf_counter()
    text, triangle = texts(shape), np.full([shape.rows] * 2, MASKED_SCORE, np.float32)
    given = {
        **starts(shape),
        "ids": text[:, :-1],
        "targets": text[:, 1:],
        "mask": np.triu(triangle, 1),
    }
    with Executor(plan, registry.get(args.backend), chosen, ranks=job, budget_s=60.0) as executor:
        for buffer, part in parts_of(result.held[job.rank], step.names, given).items():
            executor.write(buffer, part)
        ready = time.perf_counter()
        (loss,) = (b for b, n in step.names.items() if n == "loss")
        losses, times = [], []
        for _ in range(args.checked):
            job.barrier("a step")
            executor.start(1).wait(600.0)
            losses.append(float(executor.read(loss)[0]))
        for _ in range(args.repeats):
            job.barrier("a repeat")
            run = executor.start(args.steps)
            run.wait(600.0)
            times.append(run.elapsed_ms() / 1e3 / args.steps)
        job.barrier("the end")
        return {"seconds": float(np.median(times)), "losses": losses, "planned_s": planned - begun,
                "ready_s": ready - planned, "bytes": executor.device_bytes()}  # fmt: skip


def in_torch(shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """The same in torch: DistributedDataParallel, compiled unless `args.eager` is set."""
    import torch
    from torch.nn import functional as f

    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    where = torch.device(f"cuda:{rank}" if args.backend == "cuda" else "cpu")

    class Gpt(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, value in starts(shape).items():
                self.register_parameter(
                    name.replace(".", "_"), torch.nn.Parameter(torch.from_numpy(value))
                )

        def forward(self, ids: Any, targets: Any) -> Any:
            s, own = shape, dict(self.named_parameters())

            def linear(x: Any, name: str) -> Any:
                return f.linear(x, own[name], own[f"{name}_bias"])

            h = f.embedding(ids, own["table"]) + own["places"]
            for i in range(s.layers):
                x = f.layer_norm(h, (s.width,), own[f"{i}_norm"], own[f"{i}_shift"])
                parts = (
                    linear(x, f"{i}_{n}").view(len(ids), s.rows, s.heads, -1).transpose(1, 2)
                    for n in ("query", "key", "value")
                )
                mixed = f.scaled_dot_product_attention(*parts, is_causal=True)
                mixed = mixed.transpose(1, 2).reshape(len(ids), s.rows, s.width)
                h = h + linear(mixed, f"{i}_out")
                x = f.layer_norm(h, (s.width,), own[f"{i}_norm2"], own[f"{i}_shift2"])
                h = h + linear(f.gelu(linear(x, f"{i}_up"), approximate="tanh"), f"{i}_down")
            x = f.layer_norm(h, (s.width,), own["norm"], own["shift"])
            logits = f.linear(x, own["table"])
            return f.cross_entropy(logits.flatten(0, 1), targets.flatten())

    each = shape.batch // world
    own = torch.from_numpy(texts(shape)[rank * each : (rank + 1) * each]).to(where)
    ids, targets = own[:, :-1].contiguous(), own[:, 1:].contiguous()
    begun = time.perf_counter()
    model: Any = torch.nn.parallel.DistributedDataParallel(
        Gpt().to(where), device_ids=[rank] if args.backend == "cuda" else None,
        gradient_as_bucket_view=True,
    )  # fmt: skip
    adam = torch.optim.AdamW(model.parameters(), RATE, BETAS, EPS, DECAY, fused=True)
    model = model if args.eager else torch.compile(model)

    def run(count: int) -> tuple[float, Any]:
        torch.distributed.barrier()
        first = time.perf_counter()
        for _ in range(count):
            with torch.autocast(where.type, torch.bfloat16):
                loss = model(ids, targets)
            loss.backward()
            adam.step()
            adam.zero_grad(set_to_none=False)
        if args.backend == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - first) / count, loss

    losses = [float(run(1)[1].detach()) for _ in range(args.checked)]
    ready = time.perf_counter()
    times = [run(args.steps)[0] for _ in range(args.repeats)]
    peak = torch.cuda.max_memory_allocated() if args.backend == "cuda" else 0
    return {"seconds": float(np.median(times)), "losses": losses, "ready_s": ready - begun,
            "bytes": peak}  # fmt: skip


def on_a_rank(shape: Shape, args: argparse.Namespace) -> None:
    import torch

    ark.init(backend=args.backend)
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    if args.backend == "cuda":
        torch.cuda.set_device(rank)
    for name in args.sides:
        if name == "torch":
            join(args.backend)
        row = (in_torch if name == "torch" else in_ark)(shape, args)
        seconds = slowest(row.pop("seconds"))
        row = {k: round(slowest(v), 1) if k.endswith("_s") else v for k, v in row.items()}
        if name == "torch":
            # torch's loss on a rank is the mean over this rank's texts only.
            total = torch.tensor(row["losses"]).to(
                f"cuda:{rank}" if args.backend == "cuda" else "cpu"
            )
            torch.distributed.all_reduce(total)
            row["losses"] = (total / world).tolist()
        row["losses"] = [round(loss, 5) for loss in row["losses"]]
        line = {"side": name, "plan": args.plan, "ranks": world, "ms": round(1e3 * seconds, 3),
                "tokens_per_s": round(shape.batch * shape.rows / seconds), **row}  # fmt: skip
        if rank == 0:
            print(json.dumps(line), flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plan", default="data", help="data, zero1, zero2 or 1f1b")
    parser.add_argument("--offload", action="store_true", help="ark's moments in host memory")
    parser.add_argument("--sides", nargs="+", choices=("ark", "torch"), default=["ark", "torch"])
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--checked", type=int, default=3, help="steps whose losses are printed")
    parser.add_argument("--steps", type=int, default=10, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="torch without inductor")
    parser.add_argument("--plans", type=Path, help="folder in which ark's plans are kept")
    parser.add_argument("--unverified", action="store_true", help="without ark's verifier")
    args = parser.parse_args()
    shape = Shape(**{name: getattr(args, name) for name in vars(Shape())})
    raise SystemExit(ark.launch(args.ranks, on_a_rank, shape, args))


if __name__ == "__main__":
    main()
