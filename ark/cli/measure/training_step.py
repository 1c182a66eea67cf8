"""Measures training steps of torch modules. ark.training_model runs the forward pass, the gradients
and the update in one kernel. It is compared with the same step compiled by inductor, with torch's
fused optimizer. Called by `ark bench models --train`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ark.cli.measure.model_parts import WithLoss
from ark.cli.measure.modules import (
    ModuleFigures,
    figures_of_kernels,
    line_of,
    times,
    why_not_built,
)
from ark.cli.measure.networks import network
from ark.cli.measure.turn import Turn
from ark.cli.measure.whole_models import TRAINING
from ark.interop.torch import training_model
from ark.interop.torch.program import PROGRAMS

LEARNING_RATE = 1e-4
COMPARED_STEPS = 3  # steps whose losses are compared


def measure(name: str, place: str, repeats: int, peer: str, turn: Turn) -> ModuleFigures:
    """Measures a step of AdamW that trains one of the whole models on torch's device `place`. peer:
    "inductor", "eager" or empty. Dropout is off, so that losses can be compared. The distance is
    the largest relative difference from eager torch's losses in the first steps.
    """
    title = name + TRAINING
    try:
        module, given = with_loss(name, place)
    except Exception as error:  # packages in unsupported versions raise many kinds
        return ModuleFigures(title, error=why_not_built(name, error))
    figures: dict[str, Any] = {}
    with turn:
        eager = _torch_step(copy.deepcopy(module), given, lambda m: m)
        want = [float(eager()) for _ in range(COMPARED_STEPS)]
        figures["eager"], _, _ = times(eager, place, repeats)
    before, start = set(PROGRAMS), time.perf_counter()
    own = copy.deepcopy(module)
    step = training_model(own, None, torch.optim.AdamW(own.parameters(), LEARNING_RATE))
    try:
        got = [float(step(*given))]
    except Exception as error:  # torch.export may raise any error
        return ModuleFigures(title, eager=figures["eager"], error=line_of(error))
    figures["build"] = time.perf_counter() - start
    with turn:
        got += [float(step(*given)) for _ in range(COMPARED_STEPS - 1)]
        figures["distance"] = max(abs(g - w) / abs(w) for g, w in zip(got, want, strict=True))
        programs = set(PROGRAMS) - before
        figures |= figures_of_kernels(lambda: step(*given), programs, place, repeats)
    step.close()
    if peer == "eager":
        figures["peer"] = figures["eager"]
    elif peer:
        with turn:
            figures |= _inductor(module, given, place, repeats)
    return ModuleFigures(title, **figures)


def with_loss(name: str, place: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A whole model in training mode that also computes a loss, and its inputs with random classes
    as targets.
    """
    module, inputs = network(name)
    with torch.no_grad():
        scores = module.eval()(*inputs)
    classes = torch.randint(max(2, scores.shape[-1]), scores.shape[:-1])
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    whole = WithLoss(module).train().to(place)
    return whole, tuple(t.to(place) for t in (*inputs, classes))


def _torch_step(
    module: nn.Module,
    given: tuple[torch.Tensor, ...],
    compiled: Callable[[nn.Module], Callable[..., torch.Tensor]],
) -> Callable[[], torch.Tensor]:
    """A function that makes a training step by torch and returns the loss. compiled: turns the
    module into a function.
    """
    fused = given[0].device.type != "cpu"
    optimizer = torch.optim.AdamW(module.parameters(), LEARNING_RATE, fused=fused)
    forward = compiled(module)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*given)
        loss.backward()
        optimizer.step()
        return loss.detach().clone()

    return step


def _inductor(
    module: nn.Module, given: tuple[torch.Tensor, ...], place: str, repeats: int
) -> dict[str, Any]:
    """Times steps whose forward and backward passes inductor compiled."""
    torch._dynamo.reset()
    start = time.perf_counter()
    step = _torch_step(module, given, lambda m: torch.compile(m, mode="reduce-overhead"))
    try:
        step()
        build = time.perf_counter() - start
        for _ in range(4):
            step()
        call, latency, _ = times(step, place, repeats)
    except Exception as error:  # the compiler raises many kinds
        return {"peer_error": line_of(error)}
    return {"peer": call, "peer_latency": latency, "peer_build": build}
