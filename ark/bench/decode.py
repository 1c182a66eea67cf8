"""Decoding speed: ark's loop kernel, and torch beside it in the same process.

Weights are random (or a checkpoint's) and never zero; the cache is filled by running the prompt.
One launch makes all tokens; the time is the device's. Called by `ark bench decode`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from ark.backend.protocol import Backend, Device
from ark.backend.registry import FALLBACK
from ark.bench.peer import TorchDecoder, import_torch, torch_device
from ark.ir.dtype import by_name as dtype_by_name
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import LlamaConfig, rope_inverse_frequencies
from ark.models.generate import plans
from ark.models.load import weights
from ark.ops.tokens import MAX_STOPS
from ark.plan.types import Plan
from ark.runtime.executor import Executor, Ranks
from ark.runtime.run import Run

POOL = 1 << 22


@dataclass
class Figures:
    """What was measured; times in seconds, sizes in bytes."""

    per_token: float
    runs: list[float]
    tokens: list[int]
    plan_s: float
    build_s: float
    cached: bool
    weight_bytes: int
    device_bytes: int
    needed_bytes: int
    peer_per_token: dict[str, float] = field(default_factory=dict)
    logits_error: float | None = None


def random_weights(
    plan: Plan, config: LlamaConfig, seed: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """Random parameters by name: matrices scaled to keep the signal's size, norms near one."""
    pool = np.random.default_rng(seed).standard_normal(POOL, np.float32)
    for n, tensor in enumerate(plan.tensors):
        buffer = plan.buffers[tensor.buffer]
        if buffer.arena != "parameter" or buffer.name != tensor.name:
            continue
        if tensor.name == "frequencies":
            yield tensor.name, rope_inverse_frequencies(config)
            continue
        size = int(np.prod(tensor.shape))
        kind = dtype_by_name(tensor.dtype).numpy
        if len(tensor.shape) == 1:
            yield tensor.name, (1.0 + 0.1 * pool[:size]).astype(kind)
            continue
        scaled = (pool * np.float32(tensor.shape[-1] ** -0.5)).astype(kind)
        start = (n * 7919) % POOL
        out = np.resize(np.roll(scaled, start), size)
        yield tensor.name, out.reshape(tensor.shape)


def decode(
    shape: Shape,
    backend: Backend,
    device: Device,
    *,
    position: int,
    tokens: int,
    repeats: int = 5,
    checkpoint: Checkpoint | None = None,
    machine: Machine | None = None,
    ranks: Ranks | None = None,
    peers: tuple[str, ...] = (),
    options: dict[str, Any] | None = None,
) -> Figures:
    """Decodes `tokens` tokens from `position` on, `repeats` times; the median run counts.

    shape: the model's, or one rank's share of it, with room for those positions. peers: "eager",
    "compiled"; they run the whole model. Sizes are this rank's. Raises ark.errors as the executor
    does.
    """
    target = machine or device.machine
    config = shape.config
    start = time.perf_counter()
    plan = plans(shape, target, options)[shape.rank]
    planned = time.perf_counter()
    with Executor(plan, backend, device, ranks=ranks) as executor:
        built = time.perf_counter()
        torch_weights: dict[str, Any] = {}
        place = torch_device(backend.name != FALLBACK)
        source = weights(checkpoint, shape, plan) if checkpoint else random_weights(plan, config)
        for name, array in source:
            executor.write(name, array)
            if peers:
                torch_weights[name] = _to_torch(array, place)
        _fill_caches(executor, plan)
        runs: list[float] = []
        made: list[int] = []
        for _ in range(repeats + 1):
            seconds, made = _run(executor, position, tokens)
            runs.append(seconds / tokens)
        runs = runs[1:]
        needed = plan.arenas["parameter"] + plan.arenas["state"]
        figures = Figures(
            sorted(runs)[len(runs) // 2],
            runs,
            made,
            planned - start,
            built - planned,
            executor.program.cached,
            streamed_bytes(plan),
            executor.device_bytes(),
            needed,
        )
        for peer in peers:
            _compare(figures, executor, config, torch_weights, position, tokens, peer, place)
    return figures


def streamed_bytes(plan: Plan) -> int:
    """Bytes of weights that the stream copies for one token."""
    lists = plan.phases[-1].processors
    return sum(f.nbytes for tasks in lists for task in tasks for f in task.fetches)


def _run(executor: Executor, position: int, tokens: int) -> tuple[float, list[int]]:
    total = position + tokens + 1
    executor.write("tokens", (np.arange(total) * 31 % 97 + 1).astype(np.int32))
    executor.write("position", np.array([position], np.int32))
    executor.write("settings", np.array([0, 0, 0, position, total, 0], np.int32))
    executor.write("stops", np.full(MAX_STOPS, -1, np.int32))
    run: Run = executor.start(tokens)
    run.wait()
    made = executor.read("tokens")[position + 1 : position + 1 + tokens].tolist()
    return run.elapsed_ms() / 1e3, made


def _fill_caches(executor: Executor, plan: Plan) -> None:
    """Random keys and values, so that attention reads real numbers."""
    pool = np.random.default_rng(1).standard_normal(POOL, np.float32)
    for tensor in plan.tensors:
        if tensor.name.endswith((".keys", ".values")):
            values = np.resize(pool, int(np.prod(tensor.shape)))
            executor.write(tensor.name, values.astype(dtype_by_name(tensor.dtype).numpy))


def _to_torch(array: np.ndarray, place: str) -> Any:
    torch = import_torch()
    data = np.ascontiguousarray(array)
    if data.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16).to(place)
    return torch.from_numpy(data.copy()).to(place)


def _compare(
    figures: Figures,
    executor: Executor,
    config: LlamaConfig,
    torch_weights: dict[str, Any],
    position: int,
    tokens: int,
    peer: str,
    place: str,
) -> None:
    """Runs the peer from the same state; checks the first token's logits against it."""
    torch = import_torch()
    if place == torch_device(False):
        torch.set_num_threads(executor.machine.processors)
        torch_weights = {k: v.float() for k, v in torch_weights.items()}
    decoder = TorchDecoder(config, torch_weights, position + tokens + 1, place)
    with torch.inference_mode():
        for i, (keys, values) in enumerate(decoder.caches):
            for cache, kind in ((keys, "keys"), (values, "values")):
                stored = executor.read(f"layers.{i}.attention.{kind}")
                cache.copy_(_to_torch(stored, place).to(cache.dtype)[None])
    first = position * 31 % 97 + 1
    seconds, _ = decoder.run(first, position, tokens, compiled=peer == "compiled")
    figures.peer_per_token[peer] = seconds
    _run(executor, position, 1)
    ours = executor.read("decode.head.logits").astype(np.float64).ravel()
    with torch.inference_mode():
        decoder.step(torch.tensor([first], device=place), torch.tensor([position], device=place))
        theirs = decoder.logits.float().cpu().numpy().astype(np.float64).ravel()
    figures.logits_error = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
