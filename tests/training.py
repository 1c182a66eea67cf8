"""Training steps in one kernel compared with torch: the losses of all steps, from the device and
from torch.

    python -m tests.training --steps 200

trains the shipped checkpoint on the text of docs/ and fails if the curves differ.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ark
from ark.models.checkpoint import Checkpoint
from ark.models.config import LlamaConfig
from ark.models.llama import Llama

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "examples" / "noah"
CURVE_TOLERANCE = 2e-3


class Curve:
    """A tensor in which the device records a number in every iteration, such as the loss."""

    def __init__(self, steps: int) -> None:
        self.at = ark.tensor([1], ark.int32, name="step")
        self.values = ark.tensor([steps], name="losses")

    def record(self, value: ark.Tensor) -> None:
        """Writes the number at this iteration's index and increments the index."""
        here = ark.equal(ark.iota([self.values.shape()[0]], 0, ark.int32), self.at)
        ark.where(here, value, self.values, output=self.values)
        ark.add(self.at, 1, output=self.at)


def perceptron(optimizer: Callable[[list[Any]], Any], steps: int) -> tuple[Any, list[Any], Curve]:
    """Returns (the module, its inputs, the curve) of a perceptron that learns a fixed batch."""

    class Perceptron(ark.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = ark.parameter([16, 8])
            self.bias = ark.parameter([16])
            self.second = ark.parameter([4, 16])

        def forward(self, x: ark.Tensor, y: ark.Tensor) -> ark.Tensor:
            hidden = ark.silu(ark.linear(x, self.first) + self.bias)
            return ark.cross_entropy(ark.linear(hidden, self.second), y)

    module, curve = Perceptron(), Curve(steps)
    given = [ark.tensor([12, 8]), ark.tensor([12], ark.int32)]
    loss = module(*given)
    module.backward()
    curve.record(loss)
    optimizer(list(module.params_dict().values())).step()
    return module, given, curve


def torch_perceptron(
    weights: dict[str, np.ndarray], given: list[np.ndarray], optimizer: Any, steps: int
) -> list[float]:
    """Trains the same perceptron in torch in float64; returns the losses."""
    import torch

    wide = {n: torch.tensor(w, dtype=torch.float64).requires_grad_() for n, w in weights.items()}
    x, y = torch.tensor(given[0], dtype=torch.float64), torch.tensor(given[1], dtype=torch.int64)
    result = optimizer(list(wide.values()))
    losses = []
    for _ in range(steps):
        hidden = torch.nn.functional.silu(x @ wide["first"].T + wide["bias"])
        loss = torch.nn.functional.cross_entropy(hidden @ wide["second"].T, y)
        result.zero_grad()
        loss.backward()
        result.step()
        losses.append(loss.item())
    return losses


def decoder(
    config: LlamaConfig, steps: int, rows: int, optimizer: Callable[[Any], Any]
) -> tuple[Any, ark.Tensor, Curve]:
    """Returns (the module, the text (steps, rows + 1), the curve) of a decoder that learns one row
    of the text per step. It predicts each token from the preceding ones. Weights are fp32.
    """
    model = Llama(config, ark.fp32)
    model.setup(rows)
    text, curve = ark.tensor([steps, rows + 1], ark.int32), Curve(steps)
    tokens = ark.reshape(ark.gather(text, curve.at), [rows + 1])
    start = ark.tensor([1], ark.int32)
    state = ark.TokenState(tokens[0:rows], start, start, start, start)
    hidden = ark.rmsnorm(model(state, rows), model.norm, model.eps)
    loss = ark.cross_entropy(model.head(hidden), tokens[1 : rows + 1])
    result = optimizer(model.params_dict())
    gradients, _ = ark.optim.clip_grad_norm(ark.grad(loss, result.parameters), 1.0)
    curve.record(loss)
    result.step(gradients)
    return model, text, curve


def torch_decoder(
    directory: Path, layers: int, text: np.ndarray, optimizer: Callable[[Any], Any]
) -> list[float]:
    """Trains the same decoder with transformers and torch; returns the losses."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        directory, dtype=torch.float32, num_hidden_layers=layers
    )
    result = optimizer(list(model.parameters()))
    losses = []
    for row in torch.from_numpy(text.astype(np.int64)):
        logits = model(row[None, :-1]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits, row[1:])
        result.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        result.step()
        losses.append(loss.item())
    return losses


def words(directory: Path, steps: int, rows: int) -> np.ndarray:
    """Rows (steps, rows + 1) of the documentation's tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    text = "\n".join(p.read_text() for p in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text).ids[: steps * (rows + 1)]
    return np.array(ids, np.int32).reshape(steps, rows + 1)


def learn(steps: int, rows: int, layers: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The losses of the shipped model's first steps under AdamW, ark's and torch's. layers: use
    only this number of its first layers.
    """
    import torch

    whole = LlamaConfig.from_directory(SHIPPED)
    config = dataclasses.replace(whole, num_hidden_layers=layers or whole.num_hidden_layers)
    model, text, curve = decoder(config, steps, rows, lambda p: ark.optim.AdamW(p, 2e-4))
    given, checkpoint = words(SHIPPED, steps, rows), Checkpoint.open(SHIPPED)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        for name, parameter in model.params_dict().items():
            if parameter.initializer is not None:
                parameter.initialize()
            elif name != "head.weight":  # the embedding
                parameter.from_numpy(checkpoint.read(name))
        text.from_numpy(given)
        runtime.run(steps)
        ours = curve.values.to_numpy()
    theirs = torch_decoder(
        SHIPPED, config.num_hidden_layers, given, lambda p: torch.optim.AdamW(p, 2e-4)
    )
    return ours, np.array(theirs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--backend", default="cpu")
    args = parser.parse_args()
    ark.init(backend=args.backend)
    ours, theirs = learn(args.steps, args.rows)
    apart = np.abs(ours / theirs - 1)
    for step in range(0, args.steps, max(1, args.steps // 10)):
        print(f"step {step:4d}: {ours[step]:.5f}, torch {theirs[step]:.5f}")
    print(f"step {args.steps - 1:4d}: {ours[-1]:.5f}, torch {theirs[-1]:.5f}")
    print(f"largest relative difference of {args.steps} steps: {apart.max():.2e}")
    if not apart.max() < CURVE_TOLERANCE:
        raise SystemExit(f"the curves part by more than {CURVE_TOLERANCE}")


if __name__ == "__main__":
    main()
