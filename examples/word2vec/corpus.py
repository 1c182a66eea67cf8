"""Texts for word vectors, as numbers, and a synthetic text whose topics are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOISE_TABLE = 1 << 18


@dataclass(frozen=True)
class Corpus:
    """A text as numbers.

    vocabulary: the words, the most frequent first. words: the text, as indices into the vocabulary.
    texts: for each word the number of its text. raw: the number of words before rare ones were
    dropped. keep: for each word of the vocabulary the probability that an occurrence is kept.
    noise: a table of words, from which noise words are drawn; a word's frequency in it is
    proportional to its count in the text to the power 3/4.
    """

    vocabulary: list[str]
    words: np.ndarray
    texts: np.ndarray
    raw: int
    keep: np.ndarray
    noise: np.ndarray

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], least: int = 5, sample: float = 1e-3) -> Corpus:
        """Makes a corpus from texts.

        least: words that occur less often than this are dropped. sample: words whose share of the
        text is larger than this are dropped at random (Mikolov et al., 2013, section 2.3; with the
        formula of their code).
        """
        counts = Counter(word for text in texts for word in text)
        vocabulary = [w for w, n in counts.most_common() if n >= least]
        number = {w: i for i, w in enumerate(vocabulary)}
        kept = [[number[w] for w in text if w in number] for text in texts]
        often = np.array([counts[w] for w in vocabulary], np.float64)
        level = sample * often.sum() / often
        share = np.cumsum(often**0.75 / (often**0.75).sum())
        return cls(
            vocabulary,
            np.concatenate([np.asarray(k, np.int32) for k in kept]),
            np.repeat(np.arange(len(kept), dtype=np.int32), [len(k) for k in kept]),
            sum(counts.values()),
            np.minimum(np.sqrt(level) + level, 1.0).astype(np.float32),
            np.searchsorted(share, (np.arange(NOISE_TABLE) + 0.5) / NOISE_TABLE).astype(np.int32),
        )


def topics(count: int = 20, each: int = 20, texts: int = 400, length: int = 50) -> list[list[str]]:
    """Texts of one topic each. Their words are drawn from the topic's own vocabulary."""
    drawn = np.random.default_rng(0).integers(0, each, (texts, length))
    return [[f"{i % count}.{w}" for w in row] for i, row in enumerate(drawn)]


def same_topic(corpus: Corpus, vectors: np.ndarray, most: int = 5) -> float:
    """The share of each word's nearest words that have its topic; 0 if a vector is not finite."""
    if not np.isfinite(vectors).all():
        return 0.0
    of = np.array([word.split(".")[0] for word in corpus.vocabulary])
    unit = vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True).clip(1e-9)
    near = unit @ unit.T
    np.fill_diagonal(near, -2)
    return float((of[np.argsort(-near, axis=1)[:, :most]] == of[:, None]).mean())
