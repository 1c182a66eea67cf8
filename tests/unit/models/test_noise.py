"""Random draws of the sequences of a batch: each sequence has independent noise, for any seeds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.ops.tokens import _mix, _scores
from ark.tasks.sequences import MAX_BATCH
from ark.tasks.tokens import key_halves, mix, noise_key

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.1]))
SEED_COUNT = 3000


def draw(seed: int, sequence: int, at: int = 5) -> int:
    return int(_scores(LOGITS, np.float32(1), 0, noise_key(seed, sequence), at).argmax())


def test_mix_is_splitmix64s_first_numbers() -> None:
    """Compares with the first numbers of the reference generator with seed 1234567 (Vigna,
    prng.di.unimi.it).
    """
    step = 0x9E3779B97F4A7C15
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(1234567 + n * step & (1 << 64) - 1) for n in range(3)] == expected
    assert _mix(np.array([1234567], np.uint64)).tolist() == expected[:1]


def test_no_two_sequences_of_any_seeds_have_one_key() -> None:
    seeds = [*range(-20, 500), 1 << 32, (1 << 32) + 1, (1 << 64) - 600]
    keys = {noise_key(seed, b) for seed in seeds for b in range(MAX_BATCH)}
    assert len(keys) == len(seeds) * MAX_BATCH
    for key in list(keys)[:100]:
        low, high = key_halves(key)
        assert (high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF == key
        assert np.array([low, high], np.int32).tolist() == [low, high]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(lambda s: (s, 0), lambda s: (s, 1), id="two sequences"),
        pytest.param(lambda s: (s, 1), lambda s: (s + 1, 0), id="the next seed's first sequence"),
        pytest.param(lambda s: (s, 3), lambda s: (s ^ 1, 2), id="neighbours in both"),
        pytest.param(lambda s: (s, 0), lambda s: (s + (1 << 32), 0), id="seeds 2^32 apart"),
    ],
)
def test_draws_of_two_sequences_are_independent(first: object, second: object) -> None:
    """Pearson's chi-squared statistic of a table of pairs, with 15 degrees of freedom. It exceeds
    37.7 with a probability of 0.001. The seeds are fixed, so the test is deterministic.
    """
    table = np.zeros((4, 4))
    for seed in range(SEED_COUNT):
        table[draw(*first(seed)), draw(*second(seed))] += 1  # type: ignore[operator]
    chances = np.exp(LOGITS)
    expected = np.outer(chances, chances) * SEED_COUNT
    assert ((table - expected) ** 2 / expected).sum() < 37.7


def test_draws_over_the_sequences_of_one_seed_follow_the_softmax() -> None:
    counts = np.zeros(4)
    for seed, sequence in itertools.product(range(50), range(MAX_BATCH)):
        counts[draw(seed, sequence)] += 1
    expected = np.exp(LOGITS) * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # 3 degrees of freedom, p = 0.001


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1, 0.5])
def test_seed_has_64_bits(seed: float) -> None:
    with pytest.raises(InvalidUsageError, match="seed"):
        SamplingParams(seed=seed)  # type: ignore[arg-type]
