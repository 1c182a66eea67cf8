"""The examples on every backend: word2vec and adasum on one rank give the results that their
multi-rank tests expect (test_pose.py and test_msgemm.py test the other two).
"""

from __future__ import annotations

import numpy as np
import pytest

from examples.adasum import adasum
from examples.word2vec import word2vec
from tests.cases import adasum as ranks_of_adasum
from tests.cases import word2vec as ranks_of_word2vec
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")


def test_word2vec(backend: str) -> None:
    given, options = ranks_of_word2vec.text(), ranks_of_word2vec.SMALL
    (vectors,) = word2vec.train(given, options).vectors
    want = ranks_of_word2vec.wanted(given, options, 1, "sum")
    np.testing.assert_allclose(vectors, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("LAMB", marks=slow)])
def test_adasum(backend: str, optimizer: str) -> None:
    """The Adasum example on one rank equals training with the plain optimizer, reducing by a tree
    and by halving.
    """
    torch, lamb = pytest.importorskip("torch"), pytest.importorskip("tests.lamb")
    data, steps, batch = ranks_of_adasum.small_data(), 3, 8
    methods = ("tree", "halving") if optimizer == "momentum" else ("tree",)
    _, ended = adasum.train(data, steps, batch, methods, (optimizer,))
    peers = {
        "momentum": lambda p: torch.optim.SGD(p, 0.4, 0.9),
        "LAMB": lambda p: lamb.Lamb(p, 0.03, (0.9, 0.999), 0.01),
    }
    want = ranks_of_adasum.torch_weights(data, 1, "tree", peers[optimizer], steps, batch)
    for method in methods:
        for weights, wanted in zip(ended[f"{optimizer} {method}"], want, strict=True):
            np.testing.assert_allclose(weights, wanted, atol=2e-5)
