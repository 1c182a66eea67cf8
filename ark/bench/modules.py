"""The speed of torch modules: torch.compile's backend "ark" compared with torch's own "inductor" in
mode "reduce-overhead" (a captured graph of kernels), in the same process.

A call is timed as a user sees it: the mean of many in a row, until the device has finished. The
host's time for a call and the kernel's time are measured separately. Called by `ark bench torch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ark.bench.networks import network
from ark.bench.peer import waiting
from ark.interop.torch import backend
from ark.interop.torch.program import PROGRAMS

CALLS_S = 0.05  # about how long the calls of one measurement take


@dataclass(frozen=True)
class ModuleFigures:
    """Seconds. call: one call among many. latency: a call that is waited for. host: until a call
    returns. kernel: one iteration among many of one launch, of all kernels. distance: the largest
    relative difference from torch. build: the first call's. peer, eager: inductor's and torch's own
    calls. error, peer_error: the reason if there are none.
    """

    name: str
    call: float = 0.0
    latency: float = 0.0
    host: float = 0.0
    kernel: float = 0.0
    distance: float = 0.0
    build: float = 0.0
    kernels: int = 0
    peer: float = 0.0
    peer_latency: float = 0.0
    eager: float = 0.0
    error: str = ""
    peer_error: str = ""


def measure(name: str, place: str, repeats: int = 5, peer: bool = False) -> ModuleFigures:
    """One of the networks on torch's device `place`."""
    try:
        module, example = network(name)
    except ImportError as error:
        return ModuleFigures(name, error=f"{_line(error)}; install what it names")
    module, example = module.to(place), example.to(place)
    figures: dict[str, Any] = {}
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        want = module(example)
        figures["eager"], _, _ = _times(lambda: module(example), place, repeats)
        before = set(PROGRAMS)
        start = time.perf_counter()
        torch._dynamo.reset()
        try:
            compiled = torch.compile(module, backend=backend)
            got = compiled(example)
        except Exception as error:  # any error of torch's own front end
            return ModuleFigures(name, eager=figures["eager"], error=_line(error))
        figures["build"] = time.perf_counter() - start
        figures["distance"] = float(((got - want).abs() / (1 + want.abs())).max())
        call = _times(lambda: compiled(example), place, repeats)
        figures["call"], figures["latency"], figures["host"] = call
        kept = compiled(example)  # the kernels' results go there again
        programs = set(PROGRAMS) - before
        figures["kernels"] = len(programs)
        figures["kernel"] = sum(p.iteration_seconds() for p in programs)
        del kept
    if peer:
        figures |= _peer(module, example, place, repeats)
    return ModuleFigures(name, **figures)


def _peer(module: Any, example: Any, place: str, repeats: int) -> dict[str, Any]:
    """Inductor's call, the faster of the two modes in which Dynamo treats recurrent layers."""
    figures: dict[str, Any] = {}
    recurrent = any(isinstance(m, torch.nn.RNNBase) for m in module.modules())
    for traced in (False, True) if recurrent else (False,):
        torch._dynamo.reset()
        with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=traced):
            compiled: Callable[..., Any] = torch.compile(module, mode="reduce-overhead")
            try:
                for _ in range(4):
                    torch.compiler.cudagraph_mark_step_begin()
                    compiled(example)
                call, latency, _ = _times(partial(compiled, example), place, repeats)
            except Exception as error:  # of the compiler itself, of many kinds
                figures["peer_error"] = _line(error)
                continue
        if call < figures.get("peer", 1e9):
            figures |= {"peer": call, "peer_latency": latency}
    return figures


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _times(call: Callable[[], Any], place: str, repeats: int) -> tuple[float, float, float]:
    """(a call among many, a call that is waited for, until a call returns), medians of seconds."""
    done = waiting(place != "cpu")
    for _ in range(3):
        call()
    done()
    start = time.perf_counter()
    for _ in range(3):
        call()
    done()
    many = max(3, min(500, int(CALLS_S * 3 / (time.perf_counter() - start))))
    rows = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(many):
            call()
        returned = time.perf_counter()
        done()
        ended = time.perf_counter()
        for _ in range(many):
            call()
            done()
        waited = time.perf_counter()
        rows.append([(ended - start) / many, (waited - ended) / many, (returned - start) / many])
    median = [sorted(column)[repeats // 2] for column in zip(*rows, strict=True)]
    return median[0], median[1], median[2]
