"""Trains a small Llama over several ranks under a plan, beside torch: the same loss, step by step.

One training step of one device is written with public ops: forward, gradients (`ark.grad`), AdamW.
A plan splits it: `data`, `tensor`, `zero1`, `zero3` by how a few tensors are cut, `1f1b` and
`tessel` by a pipeline's schedule. Each rank is a process of this machine; 100 steps are 100
iterations of one launch.

    python examples/train/ranks.py --plan tensor --ranks 2 --steps 100 --vs torch
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import ark
from ark.backend import registry
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph, Node
from ark.lower.ranks import plan_ranks
from ark.parallel import parallelize, pipelined, shape, spread, tessel
from ark.parallel.pipeline.named import list_schedule, named
from ark.parallel.transform import RankGraphs, part_of
from ark.plan.verify import verify
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor

PLANS = ("one", "data", "tensor", "zero1", "zero3", "1f1b", "tessel")


@dataclass(frozen=True)
class Config:
    """A Llama with tied embeddings, and what it learns from. batch: sequences of a step."""

    vocab: int = 64
    hidden: int = 32
    inner: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    rows: int = 16
    batch: int = 4
    eps: float = 1e-5
    theta: float = 10000.0
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1

    @property
    def head(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads


CUTS = {"query": 0, "key": 0, "value": 0, "output": 1, "gate": 0, "up": 0, "down": 1}


def parameter_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters, in the order of the model."""
    kv = c.kv_heads * c.head
    found: dict[str, tuple[int, ...]] = {"embedding": (c.vocab, c.hidden)}
    square, wide = (c.hidden, c.hidden), (c.inner, c.hidden)
    own = {
        "attention_norm": (c.hidden,),
        "query": square,
        "key": (kv, c.hidden),
        "value": (kv, c.hidden),
        "output": square,
        "mlp_norm": (c.hidden,),
        "gate": wide,
        "up": wide,
        "down": (c.hidden, c.inner),
    }
    for i in range(c.layers):
        found.update({f"layers.{i}.{name}": size for name, size in own.items()})
    return {**found, "norm": (c.hidden,)}


@dataclass
class Step:
    """A training step's graph. names: by what a tensor is called here, its buffer's name."""

    graph: Graph
    names: dict[str, str] = field(default_factory=dict)


class Builder:
    """Writes a step for one device: micro-batches through stages of layers and back, and AdamW."""

    def __init__(self, c: Config, micro_batches: int, stages: int, steps: int, gathered: bool):
        self.c, self.count, self.stages, self.steps = c, micro_batches, stages, steps
        self.gathered = gathered  # parameters are read through a copy, for ZeRO 3
        self.rows = c.batch // micro_batches
        self.step = Step(Graph())
        self.weights: dict[str, Any] = {}

    def tensor(self, name: str, size: tuple[int, ...]) -> Any:
        made = ark.tensor(size, name=name)
        self.step.names[name] = made.ir.buffer.name
        return made

    def build(self) -> Step:
        c, model = self.c, Model(0, 1)
        with use_model(model):
            for name, size in parameter_shapes(c).items():
                self.weights[name] = ark.parameter(size, name=name)
                self.step.names[name] = self.weights[name].ir.buffer.name
            self.cos, self.sin = (self.tensor(n, (c.rows, c.head)) for n in ("cos", "sin"))
            self.turn = self.tensor("turn", (c.head, c.head))
            self.mask = self.tensor("mask", (c.rows, c.rows))
            found: dict[str, list[Any]] = {name: [] for name in self.weights}
            losses = [self.micro_batch(model.graph, m, found) for m in range(self.count)]
            self.update(model.graph, found, losses)
        self.step.graph = model.graph
        return self.step

    def micro_batch(self, graph: Graph, m: int, found: dict[str, list[Any]]) -> Any:
        """Adds one there and back, and its gradients by parameter; its share of the loss."""
        c, size = self.c, (self.rows, self.c.rows, self.c.vocab)
        tokens, targets = self.tensor(f"tokens{m}", size), self.tensor(f"targets{m}", size)
        h: Any = None
        inner: list[tuple[Any, Any, dict[str, Any]]] = []
        per = c.layers // self.stages
        for stage in range(self.stages):
            with graph.scope(f"f{stage}-{m}"):
                begin, used = h, {}
                if stage == 0:
                    h = ark.matmul(tokens, self.weight("embedding", used))
                for i in range(stage * per, (stage + 1) * per):
                    h = self.layer(h, f"layers.{i}", used)
                if stage == self.stages - 1:
                    h = self.loss(h, targets, used)
                inner.append((begin, h, used))
        loss, given = h, None
        for stage in reversed(range(self.stages)):
            begin, end, used = inner[stage]
            with graph.scope(f"b{stage}-{m}"):
                wanted = [*([] if begin is None else [begin]), *used.values()]
                made = ark.grad([end], wanted, None if given is None else [given])
                if begin is not None:
                    given = made.pop(0)
                for name, gradient in zip(used, made, strict=True):
                    found[name].append((stage, gradient))
        return loss

    def weight(self, name: str, used: dict[str, Any]) -> Any:
        if name not in used:
            # Both ends of a pipeline read the embedding: each its own copy, or the gradient of the
            # last stage's would go on through all others.
            tied = name == "embedding" and self.stages > 1
            used[name] = ark.copy(self.weights[name]) if tied else self.weights[name]
        return ark.copy(used[name]) if self.gathered else used[name]

    def layer(self, h: Any, name: str, used: dict[str, Any]) -> Any:
        c = self.c

        def product(x: Any, weight: str) -> Any:
            return ark.matmul(x, self.weight(f"{name}.{weight}", used), transpose_other=True)

        def heads(x: Any, group: int) -> Any:
            split = ark.reshape(x, (self.rows, c.rows, c.kv_heads, group, c.head))
            return ark.transpose(split, [0, 2, 3, 1, 4])

        def turned(x: Any) -> Any:
            return ark.add(ark.mul(x, self.cos), ark.mul(ark.matmul(x, self.turn), self.sin))

        x = ark.rmsnorm(h, self.weight(f"{name}.attention_norm", used), c.eps)
        query = turned(heads(product(x, "query"), c.heads // c.kv_heads))
        key, value = turned(heads(product(x, "key"), 1)), heads(product(x, "value"), 1)
        scores = ark.mul(ark.matmul(query, key, transpose_other=True), c.head**-0.5)
        mixed = ark.matmul(ark.softmax(ark.add(scores, self.mask)), value)
        rows = ark.reshape(ark.transpose(mixed, [0, 3, 1, 2, 4]), (self.rows, c.rows, c.hidden))
        h = ark.add(h, product(rows, "output"))
        x = ark.rmsnorm(h, self.weight(f"{name}.mlp_norm", used), c.eps)
        return ark.add(h, product(ark.swiglu(product(x, "gate"), product(x, "up")), "down"))

    def loss(self, h: Any, targets: Any, used: dict[str, Any]) -> Any:
        """The share of the mean cross entropy, (1,)."""
        c = self.c
        x = ark.rmsnorm(h, self.weight("norm", used), c.eps)
        logits = ark.matmul(x, self.weight("embedding", used), transpose_other=True)
        picked = ark.mul(ark.log_softmax(logits), targets)
        for axis in (2, 1, 0):
            picked = ark.reduce_sum(picked, axis)
        return ark.reshape(ark.mul(picked, -1.0 / (c.batch * c.rows)), (1,))

    def update(self, graph: Graph, found: dict[str, list[Any]], losses: list[Any]) -> None:
        """AdamW, each parameter on the first stage that uses it; the loss is kept on the last."""
        c = self.c
        with graph.scope(f"u{self.stages - 1}"):
            total = losses[0]
            for other in losses[1:]:
                total = ark.add(total, other)
            at, curve = ark.tensor([1], ark.int32, name="at"), self.tensor("losses", (self.steps,))
            here = ark.equal(ark.iota([self.steps], 0, ark.int32), at)
            ark.where(here, total, curve, output=curve)
            ark.add(at, 1, output=at)
        for stage in range(self.stages):
            own = [n for n in self.weights if min(s for s, _ in found[n]) == stage]
            with graph.scope(f"u{stage}"):
                gradients = []
                for name in own:
                    total = found[name][0][1]
                    for _, other in found[name][1:]:
                        total = ark.add(total, other)
                    gradients.append(total)
                adam = ark.optim.AdamW([self.weights[n] for n in own], c.lr, c.betas, 1e-8, c.decay)
                for name, mean, square in zip(own, adam.means, adam.squares, strict=True):
                    self.step.names[f"{name}.mean"] = mean.ir.buffer.name
                    self.step.names[f"{name}.square"] = square.ir.buffer.name
                adam.step(gradients)


def make(
    c: Config, plan: str, ranks: int, steps: int, micro_batches: int = 4
) -> tuple[Step, RankGraphs]:
    """A step and its graphs on the ranks of a plan."""
    if plan in ("1f1b", "tessel"):
        step = Builder(c, micro_batches, ranks, steps, False).build()
        if plan == "tessel":
            schedule = tessel(shape("V", max(2, ranks), 1, 2), ranks, micro_batches)
        else:
            schedule = list_schedule(named("1f1b", ranks), micro_batches)
        return step, parallelize(step.graph, ranks, pipelined(schedule, block_of)).ranks
    step = Builder(c, 1, 1, steps, plan == "zero3").build()
    if plan == "one":
        return step, parallelize(step.graph, ranks, "replicated").ranks
    return step, parallelize(step.graph, ranks, spread(cuts_of(c, plan, step, ranks))).ranks


def cuts_of(c: Config, plan: str, step: Step, ranks: int) -> dict[str, int]:
    """What comes in cut, by the names of buffers."""
    cuts = {} if plan == "tensor" else {"tokens0": 0, "targets0": 0}
    for name, size in parameter_shapes(c).items():
        states = [f"{name}.mean", f"{name}.square"]
        if plan == "tensor" and name.rpartition(".")[2] in CUTS:
            cuts.update(dict.fromkeys([name, *states], CUTS[name.rpartition(".")[2]]))
        if plan in ("zero1", "zero3") and size[0] % ranks == 0:
            cuts.update(dict.fromkeys(states if plan == "zero1" else [name, *states], 0))
    return {step.names[name]: dimension for name, dimension in cuts.items()}


def block_of(node: Node) -> tuple[str, int] | int:
    """Scopes are called after blocks and micro-batches; updates belong to their stage."""
    block, _, number = node.name.partition(".")[0].partition("-")
    return int(block[1:]) if block[0] == "u" else (block, int(number))


def arrays(c: Config, seed: int, micro_batches: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What the host fills in, by the names of tensors, and the tokens (batch, rows + 1)."""
    random = np.random.default_rng(seed)
    found = {}
    for name, size in parameter_shapes(c).items():
        norm = name.endswith("norm")
        found[name] = np.ones(size) if norm else random.normal(size=size) * 0.08
    steps = np.arange(0, c.head, 2) / c.head
    angles = np.outer(np.arange(c.rows), c.theta**-steps)
    found["cos"], found["sin"] = (np.tile(f(angles), 2) for f in (np.cos, np.sin))
    half = c.head // 2
    turn = np.zeros((c.head, c.head))
    turn[np.arange(half) + half, np.arange(half)] = -1
    turn[np.arange(half), np.arange(half) + half] = 1
    found["turn"] = turn
    found["mask"] = np.triu(np.full((c.rows, c.rows), -1e9), 1)
    tokens = random.integers(0, c.vocab, (c.batch, c.rows + 1))
    one_hot = np.eye(c.vocab)[tokens]
    per = c.batch // micro_batches
    for m in range(micro_batches):
        part = one_hot[m * per : (m + 1) * per]
        found[f"tokens{m}"], found[f"targets{m}"] = part[:, :-1], part[:, 1:]
    return {name: a.astype(np.float32) for name, a in found.items()}, tokens


def train_rank(
    step: Step, made: RankGraphs, plans: Any, given: dict[str, np.ndarray], steps: int, ranks: Any
) -> np.ndarray | None:
    """Runs a rank; the losses of all steps where this rank keeps them."""
    backend, _ = registry.choose("cpu")
    held = made.held[ranks.rank]
    called = {buffer: name for name, buffer in step.names.items()}
    with Executor(
        plans[ranks.rank], backend, backend.open(0), ranks=ranks, budget_s=60.0
    ) as executor:
        for buffer, view in held.items():
            if called.get(buffer) in given:
                executor.write(buffer, part_of(given[called[buffer]], view))
        executor.start(steps).wait(600.0)
        curve = step.names["losses"]
        found = executor.read(curve).copy() if curve in held else None
        ranks.barrier()
        return found


def torch_losses(c: Config, given: dict[str, np.ndarray], tokens: np.ndarray, steps: int) -> list:
    """The same training with transformers' Llama and torch's AdamW, in fp32."""
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
        logits = model(ids[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    return losses


def work(plan: str, ranks: int, steps: int, versus: bool) -> None:
    """One rank's process; rank 0 prints the losses, which another may keep, as JSON."""
    c = Config()
    step, made = make(c, plan, ranks, steps)
    plans = plan_ranks(made.graphs, registry.machine("cpu-1"))
    verify(plans)
    given, tokens = arrays(c, 1, 4 if plan in ("1f1b", "tessel") else 1)
    with Bootstrap.from_environment() as own:
        found = train_rank(step, made, plans, given, steps, own)
        told = own.all_gather(b"" if found is None else found.astype(np.float32).tobytes())
        if own.rank == 0:
            losses = np.frombuffer(next(t for t in told if t), np.float32)
            said: dict[str, Any] = {"plan": plan, "ranks": ranks, "losses": losses.tolist()}
            if versus:
                want = np.array(torch_losses(c, given, tokens, steps))
                said["torch"] = want.tolist()
                said["largest difference"] = float(np.max(np.abs(losses / want - 1)))
            print(json.dumps(said), flush=True)
            if said.get("largest difference", 0.0) > 1e-4:
                raise SystemExit("the losses differ from torch's by more than 1e-4")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plan", choices=PLANS, default="data")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vs", choices=("torch",))
    args = parser.parse_args()
    launch: Callable[..., int] = ark.launch
    raise SystemExit(launch(args.ranks, work, args.plan, args.ranks, args.steps, bool(args.vs)))


if __name__ == "__main__":
    main()
