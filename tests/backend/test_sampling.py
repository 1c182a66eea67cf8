"""Sampling with all options of SamplingParams, compared with transformers' processors and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as processors

import ark
from ark.tasks.adjusted import IN_PROMPT
from tests.cases.sampling import DEFAULTS, LAST_PLACE, SPREAD, draw, referenced
from tests.emulated import few_emulated
from tests.slow import slow


def warped(scores: np.ndarray, temperature: float, **options: Any) -> np.ndarray:
    """Returns the probabilities of a row after transformers' warpers."""
    values = {**DEFAULTS, **options}
    chain: list[Any] = [processors.TemperatureLogitsWarper(temperature)]
    if values["top_k"]:
        chain.append(processors.TopKLogitsWarper(values["top_k"]))
    if values["top_p"] < 1:
        chain.append(processors.TopPLogitsWarper(values["top_p"]))
    if values["min_p"] > 0:
        chain.append(processors.MinPLogitsWarper(values["min_p"]))
    if values["typical_p"] < 1:
        chain.append(processors.TypicalLogitsWarper(values["typical_p"]))
    row = torch.tensor(scores, dtype=torch.float64)[None]
    for step in chain:
        row = step(torch.zeros((1, 1), dtype=torch.long), row)
    return torch.softmax(row, -1)[0].numpy()


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Asserts Pearson's chi-square test at 1e-4, over tokens expected at least five times, with the
    others in one cell. A token of probability 0 must not occur. The seeds are fixed.
    """
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(np.float64)
    assert counts[probabilities == 0].sum() == 0, np.flatnonzero(counts * (probabilities == 0))
    expected = probabilities * len(tokens)
    often = expected >= 5
    cells = [*zip(counts[often], expected[often], strict=True)]
    rest = expected[~often].sum()
    if rest >= 5:
        cells.append((counts[~often].sum(), rest))
    statistic = sum((got - want) ** 2 / want for got, want in cells)
    assert statistic <= chi_square_limit(max(1, len(cells) - 1)), statistic


def chi_square_limit(degrees: int) -> float:
    """Returns the chi-square value that is exceeded with probability 1e-4 (Wilson and Hilferty
    1931).
    """
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.719 * np.sqrt(spread)) ** 3)


FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.08},
    "typical-p": {"typical_p": 0.6},
    "every": {"top_k": 24, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
    "top-p-small": {"top_p": 1e-6},
}


@pytest.mark.parametrize("name", few_emulated(FILTERS, "every"))
def test_draws_follow_transformers_warpers(backend: str, name: str) -> None:
    """Sampled tokens have the distribution of transformers' warpers. On the CPU the test draws 10^5
    tokens: 25 sequences of 4,000.
    """
    batch, steps = (25, 4000) if backend == "cpu" else (4, 60)
    logits = np.tile(SPREAD, (batch, 1))
    drawn = draw(logits, steps, 0.8, seed=3, **FILTERS[name])
    tokens = drawn.tokens[:, :steps]
    assert_drawn_from(tokens.ravel(), warped(SPREAD, 0.8, **FILTERS[name]))
    np.testing.assert_array_equal(tokens[:, :20], referenced(drawn, 20)[:, :20])


def test_penalties_and_biases_equal_transformers(backend: str) -> None:
    """Penalties and biases give transformers' greedy tokens, each of which changes the logits of
    the next ones.
    """
    steps, prompt, penalty = 12, (3, 7, 20), 2.5
    logits = np.stack([SPREAD[:40], -np.abs(SPREAD[:40])])
    bias = {8: 0.1, 9: -100.0, int(SPREAD[:40].argmax()): -2.0}
    drawn = draw(logits, steps, prompt=prompt, bias=bias, repetition_penalty=penalty)
    add = processors.SequenceBiasLogitsProcessor({(k,): v for k, v in bias.items()})
    repeat = processors.RepetitionPenaltyLogitsProcessor(penalty)
    for row, tokens in zip(logits, drawn.tokens, strict=True):
        ids, wanted = list(prompt), []
        for _ in range(steps):
            scores = torch.tensor(row)[None]
            given = torch.tensor([ids])
            wanted.append(int(repeat(given, add(given, scores)).argmax()))
            ids.append(wanted[-1])
        assert tokens[:steps].tolist() == wanted
        assert len(set(wanted)) > 1
    np.testing.assert_array_equal(drawn.tokens[:, :steps], referenced(drawn, steps)[:, :steps])


def test_tokens_without_a_bit_in_the_mask_never_come(backend: str) -> None:
    """Tokens that the mask excludes are never sampled, neither greedily nor at random. The
    vocabulary has 61 tokens, so the last word of the mask is partly used.
    """
    allowed = np.random.default_rng(2).random((2, len(SPREAD))) < 0.3
    allowed[1] = False
    allowed[1, [0, 33, 60]] = True
    logits = np.tile(SPREAD, (2, 1))
    wanted = np.where(allowed, logits, -np.inf).argmax(1)
    greedy = draw(logits, 2, allowed=allowed, bias={int(wanted[0]): 0.5})
    assert greedy.tokens[:, :2].T.tolist() == [wanted.tolist()] * 2
    drawn = draw(logits, 30, 1.5, allowed=allowed, top_p=0.95)
    for row, tokens in zip(allowed, drawn.tokens[:, :30], strict=True):
        assert row[tokens].all() and len(set(tokens.tolist())) > 1
    np.testing.assert_array_equal(drawn.tokens[:, :30], referenced(drawn, 30)[:, :30])


@pytest.mark.emulated("slow")
def test_presence_and_frequency_count_the_text_alone(backend: str) -> None:
    """Presence and frequency penalties follow OpenAI's formula: logit - presence * (count > 0) -
    frequency * count. The count excludes the prompt.
    """
    steps, own = 20, {"presence_penalty": 0.7, "frequency_penalty": 0.45}
    drawn = draw(SPREAD[None], steps, prompt=(int(SPREAD.argmax()),), **own)
    counts, wanted = np.zeros(len(SPREAD)), []
    for _ in range(steps):
        wanted.append(int((SPREAD - 0.7 * (counts > 0) - 0.45 * counts).argmax()))
        counts[wanted[-1]] += 1
    assert drawn.tokens[0, :steps].tolist() == wanted
    assert max(counts) > 1 < len(set(wanted))
    np.testing.assert_array_equal(drawn.counts[0] & (IN_PROMPT - 1), counts)


def test_log_probabilities_equal_torch(backend: str) -> None:
    """Reported log probabilities are computed from the original logits, before penalties and
    filters. Tokens with equal log probabilities are ordered by id.
    """
    logits = np.stack([SPREAD, SPREAD[::-1] * 3])
    logits[1, [10, 20]] = 30.0
    drawn = draw(logits, 4, 1.3, top=5, logprobs=5, bias={4: 5.0}, top_p=0.9)  # 4 of the 5
    log = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    for b in range(2):
        best = torch.sort(log[b], descending=True, stable=True)
        for step in range(4):
            place = drawn.logprobs[b, LAST_PLACE + 1 + step]
            values = place.view(np.float32)
            token = int(drawn.tokens[b, step])
            assert values[0] == pytest.approx(float(log[b, token]), abs=1e-5)
            assert place[1:9:2].tolist() == best.indices[:4].tolist()
            np.testing.assert_allclose(values[2:10:2], best.values[:4], atol=1e-5)
            assert place[9:].tolist() == [-1, -1]  # the fifth was not requested
    assert (drawn.logprobs[:, : LAST_PLACE + 1] == -1).all()


@pytest.mark.emulated("slow")
def test_nothing_is_reported_where_nothing_is_asked(backend: str) -> None:
    assert (draw(SPREAD[None], 2, top=3).logprobs == -1).all()
    alone = draw(SPREAD[None], 2, top=3, logprobs=1).logprobs[0]
    assert (alone[LAST_PLACE + 1 : LAST_PLACE + 3, 0] != -1).all()
    assert (alone[:, 1:] == -1).all()


@pytest.mark.emulated("slow")
def test_suppressed_tokens_and_stops_before_the_minimum_never_come(backend: str) -> None:
    best, second, third = np.argsort(-SPREAD)[:3].tolist()
    drawn = draw(SPREAD[None], 3, bias={best: -np.inf})
    assert drawn.tokens[0, :3].tolist() == [second] * 3
    ended = draw(SPREAD[None], 6, stops=(second, best), min_tokens=2)
    assert ended.tokens[0].tolist() == [third, third, best, 0, 0, 0, 0]


def test_sequence_within_its_prompt_draws_and_counts_nothing(backend: str) -> None:
    drawn = draw(
        np.stack([SPREAD, SPREAD]), 4, last=(LAST_PLACE, LAST_PLACE + 3), top=1, logprobs=2
    )
    best = int(SPREAD.argmax())
    assert drawn.tokens[0, :4].tolist() == [best] * 4
    assert drawn.tokens[1, 2:4].tolist() == [0, best]
    assert drawn.counts[:, best].tolist() == [4, 1]
    assert (drawn.logprobs[1, : LAST_PLACE + 4] == -1).all()


@pytest.mark.emulated("slow")
def test_logits_that_are_all_suppressed_are_an_error(backend: str) -> None:
    with pytest.raises(ark.GpuError):
        draw(SPREAD[None], 1, 1.0, top_p=0.5, bias=dict.fromkeys(range(len(SPREAD)), -np.inf))
    ark.Model.reset()


@slow
@pytest.mark.parametrize("vocabulary", [32_000, 262_144])
@pytest.mark.parametrize("name", ["top-p", "every", "none"])
def test_draws_of_large_vocabularies(backend: str, vocabulary: int, name: str) -> None:
    rows = np.random.default_rng(9).standard_normal(vocabulary).astype(np.float32)
    rows[::97] += 6
    batch, steps = 50, 12_800_000 // vocabulary if backend == "cpu" else 4
    drawn = draw(np.tile(rows, (batch, 1)), steps, 0.9, seed=5, **FILTERS[name])
    assert_drawn_from(drawn.tokens[:, :steps].ravel(), warped(rows, 0.9, **FILTERS[name]))
