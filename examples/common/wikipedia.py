"""Data for word vectors that gensim ships with its tests: a text, and people's similarity
judgements.
"""

from __future__ import annotations

import numpy as np


def encyclopedia() -> list[list[str]]:
    """An excerpt of the English Wikipedia: a list of words for each article."""
    from gensim.corpora import WikiCorpus
    from gensim.test.utils import datapath

    name = datapath("enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2")
    return [list(text) for text in WikiCorpus(name, dictionary={}, processes=1).get_texts()]


def pieces(texts: list[list[str]], length: int = 128, seed: int = 0) -> list[list[str]]:
    """The texts cut into pieces of `length` words, the last piece of each text shorter, in random
    order.

    Word vectors are learned better if neighbouring pieces are not from one article.
    """
    cut = [text[i : i + length] for text in texts for i in range(0, len(text), length)]
    return [cut[i] for i in np.random.default_rng(seed).permutation(len(cut))]


def similarity(vocabulary: list[str], vectors: np.ndarray) -> float:
    """Spearman's correlation of the vectors' similarities with people's judgements (WordSim-353,
    which gensim ships).
    """
    from gensim.models import KeyedVectors
    from gensim.test.utils import datapath

    keyed = KeyedVectors(vectors.shape[1])
    keyed.add_vectors(vocabulary, vectors)
    _, spearman, _ = keyed.evaluate_word_pairs(datapath("wordsim353.tsv"))
    return float(spearman[0])
