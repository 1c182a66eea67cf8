"""Drafts by a smaller model: texts equal those of solo runs, and sampled tokens have torch's
distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from ark.errors import InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.llm import LLM
from ark.serving.types import Request
from tests.checkpoints import make_checkpoint, reference
from tests.server.process import Process
from tests.server.running import NOAH
from tests.serving.requests import (
    MAX_POSITIONS,
    Listener,
    random_requests,
    settled,
    solo_texts,
)
from tests.slow import few, slow

ASKED: dict[str, Any] = {"slots": 6, "context": MAX_POSITIONS, "page": 8, "draft": 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("small")
    return Checkpoint.open(make_checkpoint(directory, layers=2, hidden=32, intermediate=48))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Returns a draft model whose proposals are seldom right."""
    directory = tmp_path_factory.mktemp("other")
    return Checkpoint.open(make_checkpoint(directory, seed=5, layers=1, hidden=32))


def served(engine: Engine, given: Sequence[Request]) -> dict[str, list[int]]:
    listener = Listener()
    for request in given:
        engine.submit(request, listener)
    listener.wait(*(request.id for request in given))
    return listener.tokens


@pytest.mark.parametrize("sampling", few(1, ["full", ""]))
def test_model_that_agrees_saves_iterations(small: Checkpoint, sampling: str) -> None:
    """A model that is its own draft model proposes only right drafts, for a greedy and for a
    sampled text.
    """
    sampled = SamplingParams(temperature=0.9, top_k=30, seed=3, max_tokens=40)
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    prompt = tuple(range(3, 23))
    given = [Request("sampled", prompt, sampled), Request("greedy", prompt, greedy)]
    texts = solo_texts(small, given)
    with Engine.open(small, "cpu", draft_model=small, sampling=sampling, **ASKED) as engine:
        for request in given:
            before = engine.stats().iterations
            assert served(engine, [request]) == {request.id: texts[request.id]}
            assert settled(engine).iterations - before <= 40 // 4 + 2


def test_texts_are_those_of_solo_runs(small: Checkpoint, other: Checkpoint) -> None:
    """Requests give the texts of solo runs with a draft model that is mostly wrong, too few pages,
    and cancelled requests.
    """
    given, listener = random_requests(24), Listener()
    texts = solo_texts(small, given)
    asked = {**ASKED, "pages": 12}
    with Engine.open(small, "cpu", draft_model=other, **asked) as engine:
        for number, request in enumerate(given):
            engine.submit(request, listener)
            if number % 3 == 0:
                cancelled = replace(request, id=f"cancelled {number}")
                engine.submit(cancelled, listener)
                listener.wait(request.id, tokens=1)
                engine.cancel(cancelled.id)
        listener.wait(*texts)
        settled(engine)
    for name, text in listener.tokens.items():
        if name in texts:
            assert text == texts[name]


@slow
def test_sampled_tokens_have_the_models_distribution(small: Checkpoint, other: Checkpoint) -> None:
    """The second tokens of 600 seeds, most of which follow a draft, are compared with torch's
    probabilities.
    """
    prompt, count = (5, 9, 2), 600
    how = SamplingParams(temperature=0.7, max_tokens=3)
    given = [Request(str(n), prompt, replace(how, seed=n)) for n in range(count)]
    with Engine.open(small, "cpu", draft_model=other, **ASKED) as engine:
        texts = served(engine, given)
    from scipy.stats import chisquare  # takes 2 s of CPU time to import, so not at collection

    firsts = Counter(text[0] for text in texts.values())
    first, times = firsts.most_common(1)[0]
    seen = Counter(text[1] for text in texts.values() if text[0] == first)
    model = reference(small.directory)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, first]])).logits[0]
    for place, drawn in ((len(prompt) - 1, firsts), (len(prompt), seen)):
        expected = torch.softmax(logits[place].double() / 0.7, -1).numpy() * drawn.total()
        often = [token for token in np.argsort(-expected) if expected[token] >= 5]
        got = [drawn[token] for token in often]
        got, want = [*got, drawn.total() - sum(got)], [*expected[often]]
        want.append(drawn.total() - sum(want))
        assert chisquare(got, want).pvalue > 1e-3
    assert times > 30


REFUSED = [
    ({"vocab": 330}, "has a vocabulary of 330 tokens, but the model has 320"),
    ({"context": 32}, "has 32 positions, but requests may have 64"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_draft_models_that_do_not_fit_are_refused(
    small: Checkpoint, tmp_path: Path, fields: dict[str, int], words: str
) -> None:
    draft = Checkpoint.open(make_checkpoint(tmp_path / "draft", layers=1, hidden=32, **fields))
    with pytest.raises(InvalidUsageError, match=words):
        Engine.open(small, "cpu", draft_model=draft, **ASKED)


@slow
def test_llm_takes_a_draft_model(small: Checkpoint, other: Checkpoint) -> None:
    """With a draft model, `LLM` gives the same texts as without one, and pages are reserved for
    both models.
    """
    prompts = [[3, 4, 5], [9] * 20]
    how = SamplingParams(temperature=0, max_tokens=12)
    asked: dict[str, Any] = {"backend": "cpu", "max_model_len": 64, "sampling": ""}
    texts = []
    for draft in (None, other.directory):
        with LLM(small.directory, draft=draft, max_num_seqs=4, **asked) as llm:
            texts.append([a.outputs[0].token_ids for a in llm.generate(prompts, how)])
    assert texts[0] == texts[1]


@slow
def test_server_takes_a_draft_model() -> None:
    """`ark serve` with a draft model: the shipped model noah drafts for itself, so all its drafts
    are right.
    """
    body = {"prompt": "The king said", "max_tokens": 32, "temperature": 0}
    texts = []
    for words in ([], ["--draft", str(NOAH), "--draft-tokens", "5"]):
        with Process(NOAH, "--port", "0", "--context", "64", *words) as server:
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120).json()
            texts.append(answer["choices"][0]["text"])
            stats = httpx.get(f"{server.url}/stats", timeout=120).json()
    assert texts[0] == texts[1]
    assert stats["iterations"] < 12
