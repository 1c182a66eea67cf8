"""Measures decoding: ark's loop kernel, and torch in the same process.

Weights are random or a checkpoint's, and caches are random, but never zero. One launch computes all
tokens, and the device measures its time. One plan, for the longest context, serves all contexts.
Called by `ark bench decode`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from ark import log
from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.backend.registry import FALLBACK
from ark.cli.measure.ceiling import read_bandwidth
from ark.cli.measure.fidelity import GREEDY_STEPS, Fidelity, compare, greedy
from ark.cli.measure.peer import TorchDecoder, import_torch, torch_device
from ark.cli.measure.turn import Turn
from ark.ir.dtype import RowType
from ark.ir.dtype import by_name as dtype_by_name
from ark.ir.rows import row_bytes
from ark.machine import Machine
from ark.models.build import Shape
from ark.models.checkpoint import Checkpoint
from ark.models.config import LlamaConfig, rope_inverse_frequencies
from ark.models.load import weights
from ark.models.plans import plans
from ark.models.sampling import GREEDY
from ark.models.sequences import write_sequences
from ark.plan.types import Plan
from ark.runtime import tuned_collectives
from ark.runtime.executor import Executor
from ark.runtime.run import Ranks, Run

POOL_ELEMENTS = 1 << 22


@dataclass
class ContextFigures:
    """Figures of decoding from position `context` on. per_token: seconds for one token of each
    sequence, the median of `runs`. tokens: the tokens of the first sequence. read_bytes: the bytes
    that computing one token reads: the weights, and the keys and values that are cached in the
    middle of the run. further: the seconds that each token after the first adds to a launch; None
    if no launch of one token was measured. peer_s: the peers' seconds per token (a peer is another
    library, timed for comparison). fidelity: the error of the logits of "ark" and of each peer.
    """

    context: int
    per_token: float
    runs: list[float]
    tokens: list[int]
    read_bytes: int
    further: float | None = None
    peer_s: dict[str, float] = field(default_factory=dict)
    fidelity: dict[str, Fidelity] = field(default_factory=dict)


@dataclass
class PromptFigures:
    """The measured time of a prompt: seconds from the start of a launch to the first token after a
    prompt of `length` tokens.
    """

    length: int
    seconds: float
    runs: list[float]
    peer_s: dict[str, float] = field(default_factory=dict)


@dataclass
class Figures:
    """The results of a decode benchmark. Times are in seconds, sizes in bytes, rates in bytes per
    second.
    """

    variant: str
    batch: int
    plan_s: float
    build_s: float
    cached: bool
    weight_bytes: int
    device_bytes: int
    needed_bytes: int
    contexts: list[ContextFigures] = field(default_factory=list)
    prompts: list[PromptFigures] = field(default_factory=list)
    read_bandwidth: float | None = None


def _random_rows(dtype: RowType, rows: int, pool: np.ndarray) -> np.ndarray:
    """The rows of a random quantised matrix. They are scaled so that its products have about the
    same size as its inputs.
    """
    some = min(rows, POOL_ELEMENTS // dtype.columns)
    codes = np.clip(np.rint(2.5 * pool[: some * dtype.columns]), -7, 7).reshape(some, -1)
    # Unsigned storage types hold a negative 4-bit code as the code plus 16.
    codes = codes % 16 if dtype.codes.name in ("uint4", "uint8") else codes
    factor = 0.4 * dtype.columns**-0.5 * (1.0 + 0.1 * pool[: some * dtype.groups])
    if dtype.codes.name == "fp4":  # MXFP4's scales are powers of two
        factor = np.exp2(np.rint(np.log2(factor)))
    scales = factor.reshape(some, -1)
    zeros = np.full_like(scales, 8.0) if dtype.zeros else None
    distinct = row_bytes(dtype, codes, scales, zeros)
    return np.resize(distinct, (rows, dtype.itemsize))


def random_weights(
    plan: Plan, config: LlamaConfig, seed: int = 0
) -> Iterator[tuple[str, np.ndarray]]:
    """Random parameters by name. Matrices are scaled so that products have about the same size as
    their inputs; norms are near one.
    """
    pool = np.random.default_rng(seed).standard_normal(POOL_ELEMENTS, np.float32)
    for n, tensor in enumerate(plan.tensors):
        buffer = plan.buffers[tensor.buffer]
        if buffer.arena != "parameter" or buffer.name != tensor.name:
            continue
        if tensor.name == "frequencies":
            yield tensor.name, rope_inverse_frequencies(config)
            continue
        size = int(np.prod(tensor.shape))
        dtype = dtype_by_name(tensor.dtype)
        kind = dtype.numpy
        if isinstance(dtype, RowType):
            rows = size // dtype.columns
            values = _random_rows(dtype, rows, np.roll(pool, n * 7919))
            yield tensor.name, values.reshape(dtype.host_shape(tensor.shape))
            continue
        if len(tensor.shape) == 1:
            yield tensor.name, (1.0 + 0.1 * pool[:size]).astype(kind)
            continue
        scaled = (pool * np.float32(tensor.shape[-1] ** -0.5)).astype(kind)
        start = (n * 7919) % POOL_ELEMENTS
        out = np.resize(np.roll(scaled, start), size)
        yield tensor.name, out.reshape(tensor.shape)


def decode(
    shape: Shape,
    backend: Backend,
    device: Device,
    *,
    contexts: Sequence[int],
    tokens: int,
    prompts: Sequence[int] = (),
    repeats: int = 5,
    checkpoint: Checkpoint | None = None,
    machine: Machine | None = None,
    ranks: Ranks | None = None,
    peers: tuple[str, ...] = (),
    check: bool = False,
    options: dict[str, Any] | None = None,
    warm_up: int = 1,
    beside_one: bool = False,
    turn: Turn | None = None,
) -> Figures:
    """Measures decoding. For each position in `contexts`, `tokens` tokens are decoded from this
    position on. This is repeated `repeats` times after `warm_up` runs, and the median is reported.
    beside_one: True to measure a launch of one token too, if `tokens` is above 1. The difference
    gives the time of each further token.

    shape: the model's shape, or one rank's share of it. The shape has room for all decoded
    positions, and a prompt chunk if `prompts` (prompt lengths) are measured too. peers: the forms
    of the torch model to compare with, "eager" or "compiled". Peers need the whole model on this
    rank. With peers, the device's maximum read bandwidth and the fidelity are measured too. check:
    True to measure the fidelity also without peers. turn: a lock that is held while the device is
    used. Sizes in the result are this rank's. Raises the errors of the executor.
    """
    target, turn = machine or device.machine, turn or Turn()
    start = time.perf_counter()
    measured = tuned_collectives.options(target, shape.world_size, ranks)
    aloud = shape.rank == 0
    with log.slow("planning the decoder", aloud):
        plan = plans(shape, target, {**measured, **(options or {})} or None)[shape.rank]
    planned = time.perf_counter()
    compiled = turn.compile(plan, backend, device)
    build_s = time.perf_counter() - planned
    accelerated = backend.name != FALLBACK
    with turn:
        ceiling = read_bandwidth(accelerated) if peers else None
        ready = time.perf_counter()
        with Executor(plan, backend, device, ranks=ranks) as executor:
            figures = Figures(
                variant=executor.machine.variant.name,
                batch=shape.batch,
                plan_s=planned - start,
                build_s=build_s + time.perf_counter() - ready,
                cached=executor.program.cached and not compiled,
                weight_bytes=streamed_bytes(plan),
                device_bytes=executor.device_bytes(),
                needed_bytes=plan.arenas["parameter"] + plan.arenas["state"],
                read_bandwidth=ceiling,
            )
            compares = bool(peers) or check
            with log.slow("writing weights and caches to the device", aloud):
                beside = _load(executor, plan, shape, checkpoint, accelerated if compares else None)
                fill_caches(executor, plan)
            for context in contexts:
                with log.slow(f"measuring {tokens} tokens from position {context} on", aloud):
                    row = _measure(executor, shape, context, tokens, repeats, warm_up)
                if beside_one and tokens > 1:
                    one, _ = _run(executor, shape, _text(context + 1), 1)
                    row.further = (row.per_token * tokens - one) / (tokens - 1)
                figures.contexts.append(row)
            for length in prompts:
                with log.slow(f"measuring prompts of {length} tokens", aloud):
                    prompt = _measure_prompt(executor, shape, length, repeats, warm_up)
                figures.prompts.append(prompt)
            if beside is not None:
                with log.slow("comparing with torch", aloud):
                    _compare(figures, executor, shape, beside, tokens, peers, accelerated)
    return figures


def streamed_bytes(plan: Plan) -> int:
    """Bytes of weights that the operand stream (the copies of weights ahead of the tasks) fetches
    for one token.
    """
    lists = plan.phases[-1].processors
    return sum(task.streamed for tasks in lists for task in tasks)


def _load(
    executor: Executor,
    plan: Plan,
    shape: Shape,
    checkpoint: Checkpoint | None,
    accelerated: bool | None,
) -> dict[str, Any] | None:
    """Writes the weights of the checkpoint, or random ones, to the device. If `accelerated` is not
    None, returns the same weights as torch tensors, on a GPU if it is True, otherwise on the CPU.
    Returns None if it is None.
    """
    kept: dict[str, Any] = {}
    source = weights(checkpoint, shape, plan) if checkpoint else random_weights(plan, shape.config)
    for name, array in source:
        executor.write(name, array)
        if accelerated is not None:
            kept[name] = to_torch(array, torch_device(accelerated))
    return None if accelerated is None else kept


def _measure(
    executor: Executor, shape: Shape, context: int, tokens: int, repeats: int, warm_up: int
) -> ContextFigures:
    runs: list[float] = []
    tokens_of_run: list[int] = []
    text = _text(context + 1)
    for _ in range(warm_up + repeats):
        seconds, tokens_of_run = _run(executor, shape, text, tokens)
        runs.append(seconds / tokens)
    del runs[:warm_up]
    c = shape.config
    each = 2 * c.num_hidden_layers * c.kv_size // shape.world_size * shape.dtype.itemsize
    cached = shape.batch * each * (context + tokens // 2)
    read = streamed_bytes(executor.plan) + cached
    return ContextFigures(context, sorted(runs)[len(runs) // 2], runs, tokens_of_run, read)


def _measure_prompt(
    executor: Executor, shape: Shape, length: int, repeats: int, warm_up: int
) -> PromptFigures:
    runs = []
    for _ in range(warm_up + repeats):
        text, total = [_text(length)] * shape.batch, [length + 1] * shape.batch
        write_sequences(executor, shape, text, total, GREEDY, ())
        run: Run = executor.start(shape.iterations(length, 1))
        run.wait()
        runs.append(run.elapsed_ms() / 1e3)
    del runs[:warm_up]
    return PromptFigures(length, sorted(runs)[len(runs) // 2], runs)


def _text(length: int) -> list[int]:
    return [i * 31 % 97 + 1 for i in range(length)]


def _run(
    executor: Executor, shape: Shape, text: Sequence[int], tokens: int, last: Sequence[int] = ()
) -> tuple[float, list[int]]:
    """Runs one launch in which each sequence computes `tokens` tokens. Each sequence begins with
    the last token of the text, or with its own token of `last`. Returns the seconds of the launch
    and the new tokens of the first sequence.
    """
    texts = [[*text[:-1], token] for token in last] if last else [text] * shape.batch
    totals = [len(text) + tokens] * shape.batch
    write_sequences(executor, shape, texts, totals, GREEDY, (), len(text) - 1)
    run: Run = executor.start(tokens)
    run.wait()
    generated = executor.read("tokens")[len(text) : len(text) + tokens].tolist()
    return run.elapsed_ms() / 1e3, generated


def fill_caches(executor: Executor, plan: Plan) -> None:
    """Writes random keys and values to the caches, different for each sequence, so that attention
    reads realistic numbers.
    """
    pool = np.random.default_rng(1).standard_normal(POOL_ELEMENTS, np.float32)
    for tensor in plan.tensors:
        if re.fullmatch(r".*\.(keys|values)", tensor.name):
            values = np.resize(pool, int(np.prod(tensor.shape)))
            executor.write(tensor.name, values.astype(dtype_by_name(tensor.dtype).numpy))


def to_torch(array: np.ndarray, place: str) -> Any:
    torch = import_torch()
    data = np.ascontiguousarray(array)
    if data.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16).to(place)
    return torch.from_numpy(data.copy()).to(place)


def _compare(
    figures: Figures,
    executor: Executor,
    shape: Shape,
    torch_weights: dict[str, Any],
    tokens: int,
    peers: tuple[str, ...],
    accelerated: bool,
) -> None:
    """Times the decoders that ark is compared with (`peers`) from the same KV caches. Compares the
    logits of ark and of each peer with logits that are computed in fp32.
    """
    torch, place = import_torch(), torch_device(accelerated)
    if not accelerated:
        torch.set_num_threads(executor.machine.processors)
        torch_weights = {k: v.float() for k, v in torch_weights.items()}
    # torch's attention reads the whole cache, also unused positions. So for each context, a decoder
    # is created whose cache has exactly the necessary length.
    for row in figures.contexts:
        room = row.context + max(tokens, GREEDY_STEPS) + 1
        decoder = TorchDecoder(shape.config, torch_weights, room, place, batch=shape.batch)
        _copy_caches(executor, decoder)
        for peer in peers:
            first = _text(row.context + 1)[-1:] * shape.batch
            row.peer_s[peer] = decoder.run(first, row.context, tokens, peer == "compiled")
        row.fidelity = _fidelity(executor, shape, decoder, row.context)
    for prompt in figures.prompts if peers else ():
        decoder = TorchDecoder(shape.config, torch_weights, prompt.length, place)
        name = "graph" if accelerated else "eager"
        prompt.peer_s[name] = decoder.prompt(prompt.length, accelerated)


def _fidelity(
    executor: Executor, shape: Shape, decoder: TorchDecoder, context: int
) -> dict[str, Fidelity]:
    """Compares the logits of ark and of the peer with torch's logits in fp32, computed from the
    same caches.
    """
    torch = import_torch()
    config, weights, place = decoder.config, decoder.weights, decoder.device
    _copy_caches(executor, decoder)
    room, batch = len(decoder.places), shape.batch
    reference = TorchDecoder(config, weights, room, place, torch.float32, batch)
    _copy_caches(executor, reference)
    text = _text(context + 1)

    def ours(tokens: list[int], position: int) -> np.ndarray:
        _run(executor, shape, [*text, *[0] * (position - context)], 1, tokens)
        return executor.read("decode.head.logits").astype(np.float32).reshape(batch, -1)

    # The sequences have different tokens and caches.
    read, rows = greedy(ours, [text[-1] + i for i in range(batch)], context)

    def theirs(model: TorchDecoder) -> np.ndarray:
        rows = []
        with torch.inference_mode():
            for i, tokens in enumerate(read):
                at = torch.tensor([context + i], device=place)
                model.step(torch.tensor(tokens, device=place), at)
                rows.append(model.logits.float().cpu().numpy())
        return np.concatenate(rows)

    right = theirs(reference)
    del reference
    fidelity = {"ark": compare(rows, right)}
    if decoder.dtype != torch.float32:
        fidelity["torch"] = compare(theirs(decoder), right)
    return fidelity


def _copy_caches(executor: Executor, decoder: TorchDecoder) -> None:
    for i in range(decoder.config.num_hidden_layers):
        caches = [
            to_torch(executor.read(f"layers.{i}.attention.{kind}"), decoder.device)
            for kind in ("keys", "values")
        ]
        decoder.fill(i, *caches)
