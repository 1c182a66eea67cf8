"""Six kinds of model, each written once for ark and for torch, with a step of AdamW: a convolution
net, Swin blocks, Evoformer blocks, a mixture of experts, an encoder-decoder and a Llama.

A model is a function of a library of ops (`InArk` or `InTorch`), inputs and parameters. Sizes are
small and divisible by 2, 3 and 4. The first moment after one step is a tenth of the gradient, so a
comparison of moments compares gradients. Used by tests/unit/parallel/test_plans_of_models.py and
tests/plans_of_models.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ark
from ark.frontend.model import Model, use_model
from ark.ir.graph import Graph
from tests.cases.training_blocks import BLOCKS, InArk, InTorch

BATCH, RATE, BETAS, EPS, DECAY = 24, 0.01, (0.9, 0.99), 1e-6, 0.1
TRAINED_STEPS = 2


@dataclass(frozen=True)
class Step:
    """A training step on one device. names: maps the name of a buffer to the tensor's name in the
    tests.

    results: the new parameters, and their moments as `mean.NAME` and `square.NAME`. cuts: by
    buffer, the dimension that counts training examples. loss: the name of the buffer that receives
    the loss.
    """

    graph: Graph
    names: Mapping[str, str]
    results: tuple[str, ...]
    cuts: Mapping[str, int]
    loss: str


@functools.cache
def values(kind: str, layers: int, batch: int = BATCH) -> dict[str, np.ndarray]:
    """Returns inputs and initial parameters by name."""
    block = BLOCKS[kind]
    random = np.random.default_rng(len(kind))
    given = {name: make(random, batch) for name, make in block.inputs.items()}
    given.update(block.tables)
    for name, size in block.parameters(layers).items():
        scale = 0.5 / np.sqrt(np.prod(size[1:])) if len(size) > 1 else 0.1
        given[name] = random.standard_normal(size) * scale + (len(size) == 1)
    return {n: a if a.dtype == np.int32 else a.astype(np.float32) for n, a in given.items()}


def step_of(
    kind: str, layers: int, batch: int = BATCH, gathered: bool = False, passes: int = 1
) -> Step:
    """Returns the step in ark. gathered: parameters are read through a copy, as in ZeRO 3. passes:
    how often the model is applied, each time from the final values of the pass before.
    """
    block, given = BLOCKS[kind], values(kind, layers, batch)
    model = Model(0, 1)
    with use_model(model):
        inputs = {
            n: ark.tensor(given[n].shape, ark.int32 if given[n].dtype == np.int32 else ark.fp32)
            for n in (*block.inputs, *block.tables)
        }
        weights = {n: ark.parameter(s) for n, s in block.parameters(layers).items()}
        kept = ark.tensor([1])
        read = {n: ark.copy(w) for n, w in weights.items()} if gathered else weights
        loss = _loss(block.model, InArk, inputs, read, layers, batch, passes)
        every = list(weights.values())
        gradients = ark.grad(loss, every)
        adam = ark.optim.AdamW(every, RATE, BETAS, EPS, DECAY)
        adam.step(gradients)
        ark.copy(loss, output=kept)
    moments = {}
    for name, mean, square in zip(weights, adam.means, adam.squares, strict=True):
        moments.update({f"mean.{name}": mean, f"square.{name}": square})
    names = {t.ir.buffer.name: n for n, t in {**inputs, **weights, **moments}.items()}
    cuts = {inputs[n].ir.buffer.name: 0 for n in block.inputs}
    return Step(model.graph, names, (*weights, *moments), cuts, kept.ir.buffer.name)


def _loss(
    model: Callable[..., Any],
    form: Any,
    inputs: Any,
    weights: Any,
    layers: int,
    batch: int,
    passes: int,
) -> Any:
    """Returns the loss: the squares of the last pass's result, summed and divided by the batch
    size.
    """
    before = None
    for _ in range(passes):
        y, state = model(form, inputs, weights, layers, batch, before)
        before = [form.detach(x) for x in state]
    flat = form.reshape(y * y, (batch, y.shape()[1] if form is InArk else y.shape[1]))
    return form.total(form.total(flat, 1), 0) * (1.0 / batch)


@functools.cache
def in_torch(
    kind: str, layers: int, batch: int = BATCH, steps: int = TRAINED_STEPS, passes: int = 1
) -> dict[str, Any]:
    """Returns parameters and moments after `steps` steps in float64, and the last loss as
    `loss`.
    """
    block, given = BLOCKS[kind], values(kind, layers, batch)
    tensors = {
        n: torch.from_numpy(a if a.dtype == np.int32 else a.astype(np.float64))
        for n, a in given.items()
    }
    inputs = {n: tensors[n] for n in (*block.inputs, *block.tables)}
    weights = {n: tensors[n].clone().requires_grad_() for n in block.parameters(layers)}
    adam = torch.optim.AdamW(weights.values(), RATE, BETAS, EPS, DECAY)
    for _ in range(steps):
        adam.zero_grad()
        loss = _loss(block.model, InTorch, inputs, weights, layers, batch, passes)
        loss.backward()
        adam.step()
    trained = {n: w.detach().numpy() for n, w in weights.items()}
    for name, weight in weights.items():
        state = adam.state[weight]
        trained[f"mean.{name}"] = state["exp_avg"].numpy()
        trained[f"square.{name}"] = state["exp_avg_sq"].numpy()
    return {**trained, "loss": loss.detach().numpy()}
