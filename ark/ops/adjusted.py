"""The op `sample_adjusted`, which samples with all options of ark.SamplingParams.

This module has the op's NumPy reference. `ark.sample` adds the op if the TokenState has a
`sampling` state. ark.tasks.adjusted describes this state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ark.lower.ops.adjusted import lower_sample_adjusted
from ark.lower.registry import register
from ark.ops.tokens import KEY, _mix
from ark.tasks.adjusted import IN_PROMPT, OPTIONS
from ark.tasks.tokens import SETTINGS


def option_values(row: np.ndarray) -> dict[str, float]:
    """The sampling options of one sequence, by name. row: the words that store them in the tensor
    `options`.
    """
    words = np.asarray(row, np.int64).astype(np.int32)
    whole = ("top_k", "min_tokens", "logprobs", "masked")
    return {
        name: int(words[i]) if name in whole else float(words[i : i + 1].view(np.float32)[0])
        for i, name in enumerate(OPTIONS)
    }


def adjusted(
    logits: np.ndarray,
    bias: np.ndarray,
    allowed: np.ndarray,
    counts: np.ndarray,
    options: Mapping[str, float],
) -> np.ndarray:
    """The logits (vocabulary,) of one sequence after the bias is added, masked tokens are set to
    -inf and penalties for tokens that occurred (`counts`) are applied.
    """
    scores: np.ndarray = np.asarray(logits, np.float64) + bias
    if options["masked"]:
        bits = np.unpackbits(np.asarray(allowed, np.int32).view(np.uint8), bitorder="little")
        scores = np.where(bits[: len(scores)] == 1, scores, -np.inf)
    seen, times = counts != 0, counts & (IN_PROMPT - 1)
    penalty = options["repetition_penalty"]
    scores = np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)
    own = options["presence_penalty"] + options["frequency_penalty"] * times
    return np.where(times > 0, scores - own, scores)


def filtered(scores: np.ndarray, temperature: float, options: Mapping[str, float]) -> np.ndarray:
    """The scores (vocabulary,) divided by the temperature, with -inf for the tokens that top-k,
    top-p, min-p or typical-p excludes.
    """
    scaled = np.asarray(scores, np.float64) / temperature
    if 0 < options["top_k"] < len(scaled):
        scaled[scaled < np.sort(scaled)[-int(options["top_k"])]] = -np.inf
    if options["top_p"] < 1:
        order = np.sort(scaled)[::-1]
        before = np.cumsum(_probabilities(order)) - _probabilities(order)
        kept = max(1, int(np.count_nonzero(before < options["top_p"])))
        scaled[scaled < order[kept - 1]] = -np.inf
    scaled[np.exp(scaled - scaled.max()) < min(options["min_p"], 1)] = -np.inf
    if options["typical_p"] < 1:
        p = _probabilities(scaled)
        log = np.log(np.where(p > 0, p, 1))
        away = np.where(p > 0, np.abs(log - (p * log).sum()), np.inf)
        nearest = np.argsort(away, kind="stable")
        last = int(np.searchsorted(np.cumsum(p[nearest]), options["typical_p"]))
        scaled[away > away[nearest[min(last, len(nearest) - 1)]]] = -np.inf
    return scaled


def _probabilities(scaled: np.ndarray) -> np.ndarray:
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _noise(size: int, settings: np.ndarray, at: int) -> np.ndarray:
    key = int(settings[KEY[0]]) & 0xFFFFFFFF | (int(settings[KEY[1]]) & 0xFFFFFFFF) << 32
    bits = _mix(np.uint64(key) ^ (np.uint64(at << 32) | np.arange(size, dtype=np.uint64)))
    return np.asarray(-np.log(-np.log(((bits >> np.uint64(41)) + 0.5) * 2.0**-23)))


def _sample_adjusted(inputs: Sequence[np.ndarray], attrs: Mapping[str, Any]) -> list[np.ndarray]:
    """The NumPy reference of sample_adjusted. Returns the new positions, tokens, output, counts and
    log probabilities.
    """
    logits, bias, allowed, counts = (np.asarray(inputs[i]) for i in (0, 7, 8, 9))
    batch = len(logits)
    parts = [np.split(np.asarray(inputs[i]), batch) for i in (1, 2, 3, 4, 6, 10)]
    rows = zip(logits, bias, allowed, counts, *parts, strict=True)
    results = [_of_sequence(list(row), np.asarray(inputs[5])) for row in rows]
    position, tokens, output, seen, words = zip(*results, strict=True)
    joined = (np.concatenate(part) for part in (position, tokens, output))
    return [*joined, np.stack(seen), np.concatenate(words)]


def _of_sequence(row: list[np.ndarray], stops: np.ndarray) -> list[np.ndarray]:
    logits, bias, allowed, counts, settings, position, tokens, output, words, logprobs = row
    own = dict(zip(SETTINGS, map(int, settings), strict=True))
    at, last = int(position[0]), own["last"]
    known = stops[: own["stops"]]
    if at < last:
        return [position + 1, tokens, output, counts, logprobs]
    ended = at > last and (at + 1 >= min(own["limit"], len(tokens)) or tokens[at] in known)
    if ended:
        return [position, tokens, output, counts, logprobs]
    options = option_values(words)
    scores = adjusted(logits, bias, allowed, counts, options)
    if at - last < options["min_tokens"]:
        scores[known[known < len(scores)]] = -np.inf
    temperature = np.int32(np.int64(own["temperature"])).view(np.float32)
    if temperature > 0:
        scores = filtered(scores, float(temperature), options) + _noise(len(scores), settings, at)
    token = int(scores.argmax())
    tokens, output, counts, logprobs = (x.copy() for x in (tokens, output, counts, logprobs))
    tokens[at + 1] = output[at + 1] = token
    counts[token] += 1
    if options["logprobs"]:
        each = len(logprobs) // len(tokens)
        log = np.log(_probabilities(np.asarray(logits, np.float64)))
        place = logprobs[(at + 1) * each : (at + 2) * each]
        best = np.argsort(-log, kind="stable")[: min(int(options["logprobs"]) - 1, each // 2)]
        place[0] = _bits(log[token])
        place[1 : 1 + 2 * len(best) : 2] = best
        place[2 : 2 + 2 * len(best) : 2] = [_bits(log[i]) for i in best]
    return [position + 1, tokens, output, counts, logprobs]


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


register("sample_adjusted", _sample_adjusted, lower_sample_adjusted)
