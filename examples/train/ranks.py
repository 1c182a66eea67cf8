"""Trains a small Llama over several ranks under a plan, and compares the loss with torch's, step by
step.

The training step is written for one device (step.py), and a parallel plan splits it over the ranks.
The plans `data`, `tensor`, `zero1`, `zero2`, `zero3` and `co-shard` cut tensors; the other plans
are schedules of a pipeline. Each rank is a process of this machine. 100 steps are 100 iterations of
one launch.

    python examples/train/ranks.py --plan tensor --ranks 2 --steps 100 --vs torch
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import ark
from ark.backend import registry
from ark.lower.ranks import plan_ranks
from ark.machine import Machine
from ark.parallel import parallelize, pipelined, place_of, shape, spread, tessel
from ark.parallel.pipeline.named import FORWARD_PASSES, PIPELINES, STAGES_PER_DEVICE
from ark.parallel.transform import RankGraphs, part_of
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor

sys.path.insert(0, str(Path(__file__).parent))
from step import Builder, Config, Shape, Step, arrays, parameter_shapes

COPIES = ("data", "zero1", "zero2", "zero3", "co-shard")
PIPED = (*PIPELINES, "tessel")
PLANS = ("one", "tensor", *COPIES, *PIPED)
MICRO_BATCHES = 4
SMALL = Config(vocab=24, hidden=16, inner=32, layers=2, heads=4, kv_heads=4, rows=3)
CUTS = {"query": 0, "key": 0, "value": 0, "output": 1, "gate": 0, "up": 0, "down": 1}


def shape_of(plan: str, ranks: int, layers: int = 1) -> Shape:
    """The form of a step for a plan. layers: the model's number of layers, which only co-shard
    uses: it recomputes each layer separately.
    """
    if plan == "co-shard":
        return Shape(stages=layers, recomputed=True)
    if plan not in PIPED:
        return Shape(gathered=plan == "zero3")
    stages = ranks * STAGES_PER_DEVICE if plan == "interleaved" else ranks
    passes = FORWARD_PASSES if plan == "3f1b" else 1
    return Shape(MICRO_BATCHES, stages, plan == "interlaced", passes)


def make(c: Config, plan: str, ranks: int, steps: int) -> tuple[Step, RankGraphs]:
    """A step, and its graphs on the ranks of a plan."""
    step = Builder(c, shape_of(plan, ranks, c.layers), steps).build()
    if plan == "one":
        return step, parallelize(step.graph, ranks, "replicated").ranks
    if plan == "tensor":
        return step, parallelize(step.graph, ranks, spread(megatron_cuts(c, step))).ranks
    if plan == "tessel":
        schedule = tessel(shape("V", max(2, ranks), 1, 2), ranks, MICRO_BATCHES)
        return step, parallelize(step.graph, ranks, pipelined(schedule, place_of)).ranks
    cuts = {}
    if plan in COPIES:
        cuts = {"tokens0": 0, "targets0": 0}
    if plan == "interlaced":  # each rank has a part of the vocabulary
        cuts = {"embedding": 0, **{name: 2 for name in step.names if name.startswith("tokens")}}
    named = {step.names[name]: dimension for name, dimension in cuts.items()}
    return step, parallelize(step.graph, ranks, plan, cuts=named).ranks


def megatron_cuts(c: Config, step: Step) -> dict[str, int]:
    """The dimensions along which parameters and their moments are cut, by buffer names."""
    cuts = {}
    for name in parameter_shapes(c):
        if (last := name.rpartition(".")[2]) in CUTS:
            cuts.update(dict.fromkeys([name, f"{name}.mean", f"{name}.square"], CUTS[last]))
    return {step.names[name]: dimension for name, dimension in cuts.items()}


def train_rank(
    step: Step,
    rank_graphs: RankGraphs,
    plans: Any,
    given: dict[str, np.ndarray],
    steps: int,
    ranks: Any,
    backend_name: str = "cpu",
) -> np.ndarray | None:
    """Runs one rank. Returns the losses of all steps if this rank has them."""
    backend, probe = registry.choose(backend_name)
    held = rank_graphs.held[ranks.rank]
    called = {buffer: name for name, buffer in step.names.items()}
    with Executor(
        plans[ranks.rank],
        backend,
        backend.open(ranks.rank % len(probe.devices)),
        ranks=ranks,
        budget_s=60.0,
    ) as executor:
        for buffer, view in held.items():
            if called.get(buffer) in given:
                executor.write(buffer, part_of(given[called[buffer]], view))
        executor.start(steps).wait(600.0)
        curve = step.names["losses"]
        losses = executor.read(curve).copy() if curve in held else None
        ranks.barrier()
        return losses


def torch_losses(
    c: Config, given: dict[str, np.ndarray], tokens: np.ndarray, steps: int, passes: int = 1
) -> list:
    """The losses of each step when transformers' Llama and torch's AdamW do the same training, in
    fp32.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.inner,
            num_hidden_layers=c.layers, num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads, rms_norm_eps=c.eps, rope_theta=c.theta,
            tie_word_embeddings=True, max_position_embeddings=c.rows,
        )
    )  # fmt: skip
    theirs = {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
              "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
              "down": "mlp.down_proj", "attention_norm": "input_layernorm",
              "mlp_norm": "post_attention_layernorm"}  # fmt: skip
    state = {}
    for name in parameter_shapes(c):
        layer, _, last = name.rpartition(".")
        long = f"{layer}.{theirs[last]}" if layer else {"embedding": "embed_tokens"}.get(last, last)
        state[f"model.{long}.weight"] = torch.tensor(given[name])
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    adam = torch.optim.AdamW(model.parameters(), c.lr, c.betas, 1e-8, c.decay)
    ids, losses = torch.tensor(tokens), []
    for _ in range(steps):
        recycled = None
        x = model.model.embed_tokens(ids[:, :-1])
        for _ in range(passes - 1):
            with torch.no_grad():
                ended = model.model(inputs_embeds=x + recycled if recycled is not None else x)
                recycled = ended.last_hidden_state
        logits = model(inputs_embeds=x if recycled is None else x + recycled).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def machine_of(backend: str, ranks: int) -> Machine:
    """The machine of a rank: a device, or one processor of this machine."""
    if backend == "cpu":
        return registry.machine("cpu-1")
    chosen, probe = registry.choose(backend)
    if len(probe.devices) < ranks:
        raise SystemExit(f"{ranks} ranks need as many devices, and there are {len(probe.devices)}")
    device = chosen.open(0)
    try:
        return device.machine
    finally:
        device.close()


def work(plan: str, ranks: int, steps: int, versus: bool, backend: str, small: bool) -> None:
    """The process of one rank. Rank 0 prints the losses as JSON, even if another rank has them."""
    c = SMALL if small else Config()
    if c.layers % shape_of(plan, ranks).stages:
        c = replace(c, layers=shape_of(plan, ranks).stages)
    step, rank_graphs = make(c, plan, ranks, steps)
    plans = plan_ranks(rank_graphs.graphs, machine_of(backend, ranks))
    verify(plans)
    how = shape_of(plan, ranks)
    given, tokens = arrays(c, 1, how.micro_batches)
    with Bootstrap.from_environment() as own:
        rank_losses = train_rank(step, rank_graphs, plans, given, steps, own, backend)
        gathered = own.all_gather(
            b"" if rank_losses is None else rank_losses.astype(np.float32).tobytes()
        )
        if own.rank == 0:
            losses = np.frombuffer(next(t for t in gathered if t), np.float32)
            report: dict[str, Any] = {"plan": plan, "ranks": ranks, "losses": losses.tolist()}
            if versus:
                want = np.array(torch_losses(c, given, tokens, steps, how.passes))
                report["torch"] = want.tolist()
                report["largest difference"] = float(np.max(np.abs(losses / want - 1)))
            print(json.dumps(report), flush=True)
            if report.get("largest difference", 0.0) > 1e-4:
                raise SystemExit("the losses differ from torch's by more than 1e-4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plan", choices=PLANS, default="data")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vs", choices=("torch",))
    parser.add_argument(
        "--backend", default="cpu", help="cpu, or an accelerator with --ranks devices"
    )
    parser.add_argument("--small", action="store_true", help="a model of two layers, width 16")
    args = parser.parse_args()
    launch: Callable[..., int] = ark.launch
    how = (args.plan, args.ranks, args.steps, bool(args.vs), args.backend, args.small)
    raise SystemExit(launch(args.ranks, work, *how))


if __name__ == "__main__":
    main()
