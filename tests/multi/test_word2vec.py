"""examples/word2vec: a chunk's steps equal word2vec's, computed pair by pair in float64. Ranks
combine them as requested, and topics are found.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ark
from examples.common import wikipedia
from examples.word2vec import corpus, word2vec
from examples.word2vec.corpus import Corpus
from examples.word2vec.word2vec import Options
from tests.cases.collectives import build
from tests.cases.word2vec import SMALL, text, wanted


def test_one_rank_equals_plain_word2vec() -> None:
    ark.init(backend="cpu")
    given = text()
    assert 0.2 < given.keep.min() < 0.95
    (actual,) = word2vec.train(given, SMALL).vectors
    want = wanted(given, SMALL, 1, "sum")
    assert np.abs(want).max() > 2 / SMALL.size  # far from the initial values
    np.testing.assert_allclose(actual, want, rtol=1e-3, atol=1e-4)


def test_pieces_are_all_of_the_text_in_another_order() -> None:
    texts = corpus.topics(4, 6, texts=20, length=13)
    result = wikipedia.pieces(texts, 5, seed=3)
    cut = [text[i:j] for text in texts for i, j in ((0, 5), (5, 10), (10, 13))]
    assert result != cut
    assert sorted(result) == sorted(cut)


def on_a_rank(folder: str) -> None:
    ark.init(backend="cpu")
    for way in word2vec.WAYS:
        ark.Model.reset()
        options = Options(**{**SMALL.__dict__, "way": way})
        (actual,) = word2vec.train(text(), options).vectors
        np.save(Path(folder) / f"{way}.{ark.Model.get_rank()}.npy", actual)


def test_ranks_combine_rows_as_asked(tmp_path: Path) -> None:
    assert ark.launch(2, on_a_rank, str(tmp_path)) == 0
    for way in word2vec.WAYS:
        first, second = (np.load(tmp_path / f"{way}.{rank}.npy") for rank in range(2))
        np.testing.assert_array_equal(first, second)
        want = wanted(text(), SMALL, 2, way)
        np.testing.assert_allclose(first, want, rtol=1e-3, atol=1e-4, err_msg=way)


@pytest.mark.parametrize("way", word2vec.WAYS)
def test_rank_sends_the_rows_that_it_has_changed(way: str) -> None:
    """The peer's receive buffers have room for the rank's rows and their numbers in packets, which
    take 8 bytes for 4.
    """
    rows, size, vocabulary = 16, 8, 1000

    def synchronise(rank: int) -> None:
        table = ark.tensor([vocabulary, size])
        ids, steps = ark.tensor([rows], ark.int32), ark.tensor([rows, size])
        word2vec.synchronised(table, ids, steps, way, rank, 2)

    for rank, plan in enumerate(build(2, synchronise)):
        at_peer = sum(b.nbytes for b in plan.buffers if b.rank == 1 - rank)
        assert at_peer == 2 * (4 * rows + 4 * rows * size) < 4 * vocabulary * size / 20


def test_words_find_their_topic() -> None:
    ark.init(backend="cpu")
    given = Corpus.of(corpus.topics(), least=1)
    options = Options(size=32, epochs=2)
    result = word2vec.train(given, options)
    assert corpus.same_topic(given, result.vectors[-1]) > 0.9


def test_similarity_of_words_is_compared_with_people() -> None:
    pytest.importorskip("gensim")
    names = ["tiger", "cat", "car", "automobile", "king", "cabbage", "drink", "mouth"]
    given = Corpus.of([names] * 5, least=5)
    vectors = np.random.default_rng(0).normal(size=(len(names), 4)).astype(np.float32)
    assert -1 <= wikipedia.similarity(given.vocabulary, vectors) <= 1
