"""An engine with one form: results are equal bit by bit whatever runs beside a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ark.errors import InvalidUsageError
from ark.serving.engine import Engine
from ark.serving.types import Event
from tests.checkpoints import make_checkpoint
from tests.serving.requests import MAX_POSITIONS, Listener, random_requests


def test_log_probabilities_do_not_depend_on_other_requests(tmp_path: Path) -> None:
    """Each alone, then all together on few pages, with drafts. On the CPU several forms and chunks
    give equal bits too; elsewhere they need not.
    """
    directory = make_checkpoint(tmp_path / "small", layers=2, hidden=32, intermediate=48)
    requests = [
        replace(request, sampling=replace(request.sampling, logprobs=0))
        for request in random_requests(12)
    ]
    asked = {"slots": 4, "context": MAX_POSITIONS, "page": 8, "pages": 9, "draft": 2}
    with Engine.open(
        directory,
        "cpu",
        deterministic=True,
        sampling="full",
        **asked,  # type: ignore[arg-type]
    ) as engine:
        runs: list[dict[str, list[float]]] = []
        for alone in (True, False):
            logprobs: dict[str, list[float]] = {request.id: [] for request in requests}
            listener = Listener()

            def hear(
                event: Event,
                logprobs: dict[str, list[float]] = logprobs,
                listener: Listener = listener,
            ) -> None:
                logprobs[event.id] += event.logprobs
                listener(event)

            for request in requests:
                engine.submit(request, hear)
                if alone:
                    listener.wait(request.id)
            listener.wait(*logprobs)
            runs.append(logprobs)
        assert engine.stats().preemptions > 0
        assert [phase.name for phase in engine._model.executor.plan.phases] == ["decode4"]
    assert runs[0] == runs[1]
    assert all(len(values) > 0 for values in runs[0].values())


def test_chunks_beside_it_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "small", layers=1, hidden=32)
    with pytest.raises(InvalidUsageError, match="chunk=4 beside deterministic"):
        Engine.open(directory, "cpu", deterministic=True, chunk=4)
