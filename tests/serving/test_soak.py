"""An engine serves ten thousand requests: none is lost, no page and no memory leaks."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np

from ark.models.checkpoint import Checkpoint
from ark.serving.engine import Engine
from ark.serving.types import FinishReason
from tests.checkpoints import make_checkpoint
from tests.serving.requests import MAX_POSITIONS, Listener, random_requests, solo_texts
from tests.slow import slow

MAX_GROWN_KIB = 64 << 10


def peak_kib() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@slow
def test_ten_thousand_requests(tmp_path: Path) -> None:
    """Requests arrive in bursts over 24 slots, on few pages; a tenth is cancelled
    at any time.
    """
    small = Checkpoint.open(make_checkpoint(tmp_path / "small", layers=1, hidden=32))
    kinds = random_requests(100, most=40)
    wanted = solo_texts(small, kinds)
    rng = np.random.default_rng(1)
    asked = {"slots": 24, "context": MAX_POSITIONS, "page": 8, "pages": 20}
    with Engine.open(small, "cpu", **asked) as engine:  # type: ignore[arg-type]
        before = 0
        for number in range(100):
            listener, ids = Listener(), []
            for place in range(100):
                kind = kinds[int(rng.integers(len(kinds)))]
                request = replace(kind, id=f"{number}/{place}/{kind.id}")
                engine.submit(request, listener)
                ids.append(request.id)
                if rng.random() < 0.1:
                    engine.cancel(ids[int(rng.integers(len(ids)))])
            listener.wait(*ids)
            for name in ids:
                text = wanted[name.split("/")[2]]
                if listener.finish[name] == FinishReason.CANCELLED:
                    assert listener.tokens[name] == text[: len(listener.tokens[name])]
                else:
                    assert listener.tokens[name] == text
            if number == 20:
                before = peak_kib()
        engine.close()
        stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    assert stats.preemptions > 0 and stats.cached_prompt_tokens > 0
    assert peak_kib() - before < MAX_GROWN_KIB
