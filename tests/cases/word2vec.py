"""Cases and helpers of tests/multi/test_word2vec.py, which other tests use too."""

from __future__ import annotations

from typing import Any

import numpy as np

from ark.tasks.functions import FUNCTIONS
from examples.word2vec import corpus
from examples.word2vec.corpus import Corpus
from examples.word2vec.word2vec import Options

SMALL = Options(size=8, chunk=64, chunks=2, block=16, noise=8, rate=0.2, epochs=1)
Steps = dict[int, np.ndarray]


def text() -> Corpus:
    return Corpus.of(corpus.topics(4, 6, texts=20, length=13), least=1, sample=0.012)


def drawn(count: int, options: Options, step: int) -> np.ndarray:
    return FUNCTIONS["philox"].reference(
        np.arange(count), np.asarray(options.seed), np.asarray(step)
    )


def uniform(count: int, options: Options, step: int) -> np.ndarray:
    return (drawn(count, options, step) >> 8) * 2.0**-24


def sigmoid(x: float) -> float:
    return float(1 / (1 + np.exp(-x)))


def chunk_steps(
    given: Corpus, o: Options, step: int, part: int, total: int, tables: list[np.ndarray]
) -> tuple[Steps, Steps]:
    """Returns the sums that word2vec adds to the rows of both tables for every pair of a word and
    its neighbour in one part of a step. total: the number of steps of an epoch.
    """
    at = (step % total * o.chunks + part) * o.chunk
    words, texts = given.words[at : at + o.chunk], given.texts[at : at + o.chunk]

    def mine(chance: Any, many: int, number: int) -> np.ndarray:
        return chance(o.chunks * many, o, 3 * step + number)[part * many : (part + 1) * many]

    kept = mine(uniform, o.chunk, 0) < given.keep[words]
    words, texts = words[kept], texts[kept]
    reach = 1 + np.floor(mine(uniform, o.chunk, 1) * o.window)
    noise = given.noise[mine(drawn, o.chunk // o.block * o.noise, 2) % len(given.noise)]
    rate = o.rate * max(1 - step / (total * o.epochs), 1e-4)
    vectors, contexts = tables
    moved: tuple[Steps, Steps] = ({}, {})

    def add(which: int, row: int, by: np.ndarray) -> None:
        moved[which][row] = moved[which].get(row, 0.0) + by

    for i, middle in enumerate(words):
        for j in range(len(words)):
            if j == i or abs(j - i) > reach[i] or texts[j] != texts[i]:
                continue
            x, y = vectors[words[j]], contexts[middle]
            g = rate * (1 - sigmoid(x @ y))
            add(0, words[j], g * y)
            add(1, middle, g * x)
            block = i // o.block
            for word in noise[block * o.noise : (block + 1) * o.noise]:
                z = contexts[word]
                g = -rate * o.negative / o.noise * sigmoid(x @ z)
                add(0, words[j], g * z)
                add(1, word, g * x)
    return moved


def wanted(given: Corpus, o: Options, world: int, way: str) -> np.ndarray:
    """Returns the expected word vectors after an epoch, computed by NumPy."""
    shape = (len(given.vocabulary), o.size)
    start = np.random.default_rng(o.seed).uniform(-0.5, 0.5, shape) / o.size
    tables = [start.astype(np.float32).astype(np.float64), np.zeros(shape)]
    steps = len(given.words) // (o.chunk * o.chunks * world)
    for step, part in np.ndindex(steps, o.chunks):
        of = (part, steps * world, tables)
        every = [chunk_steps(given, o, step * world + r, *of) for r in range(world)]
        for which, table in enumerate(tables):
            for row in {row for actual in every for row in actual[which]}:
                parts = [actual[which].get(row, np.zeros(o.size)) for actual in every]
                total = parts[0]
                for part in parts[1:]:
                    if way == "combiner" and total @ total > 0:
                        part = part - (total @ part) / (total @ total) * total
                    total = total + part
                table[row] += total / world if way == "average" else total
    return tables[0]
