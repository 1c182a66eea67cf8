"""Writes the state of a decoder's sequences before a launch, and reads their tokens while it runs.

Called by ark.models.generate and `ark bench decode`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from ark.errors import GpuError, InvalidUsageError
from ark.models.build import Shape
from ark.models.options import bias_of, check_tokens, counts_of, option_words
from ark.models.sampling import SamplingParams
from ark.ops.tokens import MAX_STOPS
from ark.runtime.run import Run
from ark.runtime.runner import Runner
from ark.tasks.tokens import SETTINGS, key_halves, noise_key


def write_sequences(
    runner: Runner,
    shape: Shape,
    prompts: Sequence[Sequence[int]],
    totals: Sequence[int],
    sampling: SamplingParams,
    stops: Sequence[int],
    position: int = 0,
) -> None:
    """Sets the state of a launch, for up to as many sequences as the shape's batch.

    totals: the final number of tokens of each sequence, its prompt included. The noise of sequence
    b is derived from a hash of the seed and b. stops: stop tokens, of which the device receives the
    first MAX_STOPS. position: the position of the first token that is read; the keys and values of
    earlier tokens are already in the caches. A sequence without a prompt has the limit 0, so it is
    complete from the start.
    """
    tokens = np.zeros((shape.batch, shape.context), np.int32)
    settings = np.zeros((shape.batch, len(SETTINGS)), np.int32)
    settings[:, SETTINGS.index("last")] = -1
    if shape.sampling:
        write_options(runner, shape, prompts, sampling)
    known = list(stops[:MAX_STOPS])
    temperature = int(np.float32(sampling.temperature).view(np.int32))
    for b, (prompt, total) in enumerate(zip(prompts, totals, strict=True)):
        tokens[b, : len(prompt)] = prompt
        low, high = key_halves(noise_key(sampling.seed or 0, b))
        last = len(prompt) - 1
        top_k = 0 if shape.sampling else sampling.top_k  # otherwise top-k is one of the options
        settings[b] = [temperature, top_k, low, last, total, len(known), high]
    runner.write("tokens", tokens.ravel())
    runner.write("position", np.full(shape.batch, position, np.int32))
    runner.write("settings", settings.ravel())
    runner.write("stops", np.array([*known, *([-1] * (MAX_STOPS - len(known)))], np.int32))


def write_options(
    runner: Runner, shape: Shape, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> None:
    """Sets the state of ark.ops.sampling_state.SamplingState, with the same sampling parameters for
    each sequence.
    """
    vocabulary = shape.config.vocab_size
    check_tokens(sampling, vocabulary)
    bias = np.zeros((shape.batch, vocabulary), np.float32)
    counts = np.zeros((shape.batch, vocabulary), np.int32)
    added = bias_of(sampling, vocabulary)
    for b, prompt in enumerate(prompts):
        seen = counts_of(sampling, vocabulary, prompt)
        bias[b] = 0 if added is None else added
        counts[b] = 0 if seen is None else seen
    runner.write("options", np.tile(option_words(sampling), shape.batch))
    runner.write("bias", bias)
    runner.write("counts", counts)


def read_logprobs(words: np.ndarray, asked: int) -> tuple[float, dict[int, float]]:
    """The log probability of a sampled token, and the `asked` highest log probabilities by token
    id. words: the memory into which the device (ark.tasks.adjusted) writes the log probabilities.
    They may arrive shortly after the token, so this function waits for them.
    """
    end = time.monotonic() + 10
    while (words[: 1 + 2 * asked] == -1).any():
        if time.monotonic() > end:
            raise GpuError(
                "the device wrote a token, but not its log probabilities within 10 s; report it"
            )
    values = words.view(np.float32)
    best = {int(words[1 + 2 * n]): float(values[2 + 2 * n]) for n in range(asked)}
    return float(values[0]), best


def read_tokens(
    run: Run,
    output: np.ndarray,
    starts: Sequence[int],
    totals: Sequence[int],
    stops: Sequence[int],
    context: int,
) -> Iterator[tuple[int, int]]:
    """Yields (sequence, token) as the device writes tokens to `output`. This is host-mapped memory
    with `context` entries per sequence; -1 marks an entry that is not written yet.

    starts, totals: for each sequence, the index of its first token and the index after its last
    token. A sequence ends earlier at a token of `stops`.
    """
    places = dict(enumerate(starts))
    pause, over = 2e-5, False
    while places:
        progress = False
        for sequence, place in list(places.items()):
            token = _token(run, output, sequence * context + place)
            if token < 0:
                continue
            progress = True
            places[sequence] = place + 1
            yield sequence, token
            if token in stops or place + 1 == totals[sequence]:
                del places[sequence]
        if progress:
            pause = 2e-5
            continue
        run.check()
        if over:
            return
        over = not run.running()  # read before the tokens, so that no token is missed
        time.sleep(pause)
        pause = min(pause * 1.5, 1e-3)


def _token(run: Run, output: np.ndarray, place: int) -> int:
    """The token at index `place` of `output`. Raises InvalidUsageError if the Generator was closed,
    because closing frees this memory.
    """
    if run.detached:
        raise InvalidUsageError(
            "the Generator was closed while this stream was open; read a stream to its end "
            "before closing"
        )
    return int(output[place])
