"""Measures torch modules that are compiled by torch.compile's backend "ark". In the same process
they are compared with torch's own backend "inductor" in mode "reduce-overhead" (a captured graph of
kernels), with uncompiled torch, or with onnxruntime on the exported module.

Many consecutive calls are timed until the device has finished; the time of a call is their mean.
The host's time for a call and the kernel's time are measured separately. Called by `ark bench
torch` and `ark bench models`.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ark.cli.measure.networks import network
from ark.cli.measure.peer import waiting
from ark.cli.measure.turn import Turn
from ark.interop.torch import backend
from ark.interop.torch.last_calls import kept_tensors
from ark.interop.torch.program import LEFT, PROGRAMS, Program

CALLS_S = 0.05  # about how long the calls of one measurement take


@dataclass(frozen=True)
class ModuleFigures:
    """The measurements of one module. Times are in seconds. call: the mean time of many consecutive
    calls. latency: the time of a single call, until the device has finished. host: the time until a
    call returns. kernel: the time of one of many iterations in one launch, summed over all kernels.
    build, peer_build: the time of the first call of ark and of the peer, with compilation. peer,
    eager: like `call`, for the peer and for uncompiled torch.

    distance: the largest relative difference from torch's result. memory: bytes of the kernels' own
    memory, without parameters. left: the reasons why some operators stay in torch. error,
    peer_error: the reason if times of ark or of the peer are missing.
    """

    name: str
    call: float = 0.0
    latency: float = 0.0
    host: float = 0.0
    kernel: float = 0.0
    distance: float = 0.0
    build: float = 0.0
    kernels: int = 0
    memory: int = 0
    left: tuple[str, ...] = ()
    peer: float = 0.0
    peer_latency: float = 0.0
    peer_build: float = 0.0
    eager: float = 0.0
    error: str = ""
    peer_error: str = ""


def measure(
    name: str, place: str, repeats: int = 5, peer: str = "", turn: Turn | None = None
) -> ModuleFigures:
    """Measures one of the networks on torch's device `place`. peer: one of PEERS, or empty. turn: a
    lock that is held while calls are timed. The first compiled call, which compiles, is made before
    the lock is taken.
    """
    turn = turn or Turn()
    try:
        module, examples = network(name)
    except Exception as error:  # packages in unsupported versions raise many kinds
        return ModuleFigures(name, error=why_not_built(name, error))
    figures: dict[str, Any] = {}
    with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=True):
        with turn:
            module, examples = module.to(place), tuple(t.to(place) for t in examples)
            want = module(*examples)
            figures["eager"], _, _ = times(lambda: module(*examples), place, repeats)
        before = set(PROGRAMS)
        LEFT.clear()
        start = time.perf_counter()
        torch._dynamo.reset()
        try:
            compiled = torch.compile(module, backend=backend)
            got = compiled(*examples)
        except Exception as error:  # torch's front end may raise any error
            return ModuleFigures(name, eager=figures["eager"], error=line_of(error))
        figures["build"] = time.perf_counter() - start
        figures["left"] = tuple(LEFT)
        with turn:
            figures["distance"] = float(((got - want).abs() / (1 + want.abs())).max())
            programs = set(PROGRAMS) - before
            figures |= figures_of_kernels(lambda: compiled(*examples), programs, place, repeats)
    if peer == "eager":
        figures["peer"] = figures["eager"]
    elif peer:
        with turn:
            figures |= PEERS[peer](module, examples, place, repeats)
    return ModuleFigures(name, **figures)


def why_not_built(name: str, error: Exception) -> str:
    """Why a model could not be built, and what to do if a package is missing."""
    if isinstance(error, ImportError):
        return f"{line_of(error)}; install what it names"
    return f"{line_of(error)}; the installed package builds no {name}"


def figures_of_kernels(
    call: Callable[[], Any], programs: Collection[Program], place: str, repeats: int
) -> dict[str, Any]:
    """The fields of ModuleFigures that describe compiled calls. call: runs all `programs` once."""
    per_call, latency, host = times(call, place, repeats)
    with kept_tensors():
        call()
        kernel = sum(p.iteration_seconds() for p in programs)
    memory = sum(p.memory_bytes() for p in programs)
    figures = {"call": per_call, "latency": latency, "host": host, "kernel": kernel}
    return {**figures, "kernels": len(programs), "memory": memory}


def _exported(module: Any, examples: Any, place: str, repeats: int) -> dict[str, Any]:
    """Times calls of onnxruntime on the module, exported by torch.onnx. On a GPU the time includes
    copies between host and device.
    """
    try:
        import onnxruntime

        start = time.perf_counter()
        accelerated = ["CUDAExecutionProvider"] if place != "cpu" else []
        providers = [*accelerated, "CPUExecutionProvider"]
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            file = Path(folder, "model.onnx")  # large weights are in separate files in the folder
            torch.onnx.export(module, examples, file, dynamo=True, verbose=False)
            session = onnxruntime.InferenceSession(str(file), providers=providers)
        names = [p.name for p in session.get_inputs()]
        given = {n: t.cpu().numpy() for n, t in zip(names, examples, strict=True)}
        session.run(None, given)
        build = time.perf_counter() - start
        call, latency, _ = times(lambda: session.run(None, given), "cpu", repeats)
    except Exception as error:  # the exporter raises many kinds
        return {"peer_error": line_of(error)}
    return {"peer": call, "peer_latency": latency, "peer_build": build}


def _inductor(module: Any, examples: Any, place: str, repeats: int) -> dict[str, Any]:
    """Times calls of the module compiled by inductor. Dynamo has two modes for recurrent layers;
    the faster one is used.
    """
    figures: dict[str, Any] = {}
    recurrent = any(isinstance(m, torch.nn.RNNBase) for m in module.modules())
    for traced in (False, True) if recurrent else (False,):
        torch._dynamo.reset()
        with torch.no_grad(), torch._dynamo.config.patch(allow_rnn=traced):
            compiled: Callable[..., Any] = torch.compile(module, mode="reduce-overhead")
            start = time.perf_counter()
            try:
                compiled(*examples)
                build = time.perf_counter() - start
                for _ in range(4):
                    torch.compiler.cudagraph_mark_step_begin()
                    compiled(*examples)
                call, latency, _ = times(partial(compiled, *examples), place, repeats)
            except Exception as error:  # the compiler raises many kinds
                figures["peer_error"] = line_of(error)
                continue
        if call < figures.get("peer", 1e9):
            figures |= {"peer": call, "peer_latency": latency, "peer_build": build}
    return figures


PEERS: dict[str, Callable[[Any, Any, str, int], dict[str, Any]]] = {
    "inductor": _inductor,
    "onnxruntime": _exported,
}


def line_of(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"[:500]


def times(call: Callable[[], Any], place: str, repeats: int) -> tuple[float, float, float]:
    """Medians of three times in seconds: the time of one of many consecutive calls, the time of a
    single call until the device has finished, and the time until a call returns.
    """
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
