"""The device's random numbers: the words of the published generator, the same on every backend, and
the expected moments.
"""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.tasks.functions import FUNCTIONS

# Expected output words of Philox for a counter and key: Random123's first known answer, and blocks
# 2 to 4 of the Python package randomgen's Philox(number=4, width=32).
ZEROS = (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
COUNTER, STREAM, KEY = 0x05A308D30243F6A8, 0x0370734413198A2E, 0x299F31D0A4093822
# fmt: off
BLOCKS = (
    0x11DDFE43, 0x4E0B32E4, 0xD7D2ED38, 0x59DC5098, 0xC160889B, 0xCCF3E1A5,
    0x5CD75CD9, 0x575313FC, 0x26AD0B99, 0x3597E870, 0xDF10BDDB, 0x81080039,
)
# fmt: on


def words(places: np.ndarray, seed: int, step: int = 0) -> np.ndarray:
    return FUNCTIONS["philox"].reference(places, np.asarray(seed), np.asarray(step))


def test_reference_gives_published_words() -> None:
    assert tuple(words(np.arange(4), 0)) == ZEROS
    places = np.arange(4, 16) + 4 * COUNTER
    assert tuple(words(places, KEY, STREAM)) == BLOCKS


def test_words_and_numbers_of_every_step(backend: str) -> None:
    """Random words and numbers equal those of the published generator. After a launch of five
    iterations, they are the words and numbers of the fifth step.
    """
    shape, seed = [3, 7, 40], -(2**62) + 12345
    step = ark.tensor([1], ark.int64)
    ark.add(step, 1, output=step)
    bits = ark.random_bits(shape, seed, step)
    uniform = ark.random_uniform(shape, seed, step, low=-2.0, high=3.0)
    normal = ark.random_normal(shape, seed, step, mean=1.0, std=2.0)
    half = ark.random_uniform([5, 5], ark.cast(step, ark.uint8), 3, dtype=ark.bf16)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        step.from_numpy(np.array([2**40]))
        runtime.run(5)
        got = [t.to_numpy() for t in (bits, uniform, normal, half)]
    now, count = 2**40 + 5, int(np.prod(shape))
    want = words(np.arange(count), seed, now).reshape(shape)
    np.testing.assert_array_equal(got[0], want.astype(np.uint32))
    np.testing.assert_allclose(got[1], (want >> 8) * 2.0**-24 * 5 - 2, rtol=0, atol=1e-6)
    u, v = (words(2 * np.arange(count) + i, seed, now).reshape(shape) >> 8 for i in (0, 1))
    z = np.sqrt(-2 * np.log1p(-u * 2.0**-24)) * np.cos(2 * np.pi * v * 2.0**-24)
    np.testing.assert_allclose(got[2], 2 * z + 1, rtol=2e-5, atol=2e-5)
    first = (words(np.arange(25), 5, 3).reshape(5, 5) >> 8) * 2.0**-24
    np.testing.assert_allclose(got[3].astype(np.float64), first, rtol=2**-8)


def test_random_numbers_have_the_requested_distribution() -> None:
    from scipy import stats  # takes 2 s of CPU time, so it is not imported at collection

    ark.init(backend="cpu")
    uniform = ark.random_uniform([200, 500], 1)
    normal = ark.random_normal([200, 500], 1, 1)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        runtime.run(1)
        u, z = uniform.to_numpy().ravel(), normal.to_numpy().ravel()
    assert u.min() >= 0.0
    assert u.max() < 1.0
    assert stats.kstest(u, "uniform").pvalue > 0.01
    assert stats.kstest(z, "norm").pvalue > 0.01
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.01 > abs(np.corrcoef(u, z)[0, 1])


def test_dropout_and_its_gradient(backend: str) -> None:
    """The gradient of dropout is 0 exactly for the elements that dropout set to 0."""
    x = ark.parameter([64, 33])
    kept = ark.dropout(x, 0.25, seed=9)
    (gradient,) = ark.grad(ark.reduce_sum(ark.reshape(kept, [64 * 33]), 0), [x])
    values = np.random.default_rng(0).uniform(1, 2, (64, 33)).astype(np.float32)
    with ark.Runtime() as runtime:
        runtime.launch(loop_mode=False)
        x.from_numpy(values)
        runtime.run(1)
        results, slope = kept.to_numpy(), gradient.to_numpy()
    mask = (words(np.arange(64 * 33), 9).reshape(64, 33) >> 8) * 2.0**-24 >= 0.25
    np.testing.assert_allclose(results, np.where(mask, values / 0.75, 0), rtol=1e-6)
    np.testing.assert_allclose(slope, np.where(mask, 1 / 0.75, 0), rtol=1e-6)
    assert 0.7 < mask.mean() < 0.8


def test_invalid_distributions_are_refused() -> None:
    ark.init(backend="cpu")
    with pytest.raises(ark.InvalidUsageError, match="more than 64 bits"):
        ark.random_bits([4], 2**63)
    with pytest.raises(ark.ModelError, match=r"integers of shape \[1\]"):
        ark.random_uniform([4], ark.tensor([1], ark.fp32))
    with pytest.raises(ark.ModelError, match=r"integers of shape \[1\]"):
        ark.random_normal([4], 1, ark.tensor([2], ark.int32))
    with pytest.raises(ark.ModelError, match="expected floating point"):
        ark.random_uniform([4], 1, dtype=ark.int32)
    with pytest.raises(ark.InvalidUsageError, match="the rate is 1"):
        ark.dropout(ark.tensor([4]), 1.0, 1)
