"""Long launches of the engine, which the device ends early when the host sets a word in memory. The
tests count iterations: after the word is set, the running iteration is completed and no other runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

import numpy as np
import pytest

from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.progress import Done
from ark.serving.rows import NO_TOKEN, DeviceRows, Launched
from ark.serving.scheduler import Step
from ark.serving.types import Event, FinishReason, LaunchRecord, Request
from tests.checkpoints import make_checkpoint
from tests.serving.requests import Listener, random_requests, solo_texts

MAX_POSITIONS = 1024
MAX_ATTEMPTS = 20
PROMPT = (*range(3, 90), *range(5, 80))  # of many chunks


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("small")
    sizes: dict[str, Any] = {
        "layers": 1,
        "hidden": 32,
        "intermediate": 48,
        "context": MAX_POSITIONS,
    }
    return Checkpoint.open(make_checkpoint(directory, **sizes))


def opened(small: Checkpoint, **asked: Any) -> Engine:
    given = {"slots": 2, "context": MAX_POSITIONS, "iterations": MAX_POSITIONS, **asked}
    return Engine.open(small, "cpu", **given)


def long(request_id: str, tokens: int | None = None) -> Request:
    return Request(request_id, (3, 4, 5), SamplingParams(temperature=0.0, max_tokens=tokens))


@contextmanager
def launches() -> Iterator[list[tuple[Step, int]]]:
    """Records the launches in this block: their steps and the number of iterations."""
    records: list[tuple[Step, int]] = []
    end = Launched.end

    def watched(self: Launched) -> tuple[Done, list[tuple[int, list[int]]]]:
        done, tokens = end(self)
        records.append((self._step, done.iterations))
        return done, tokens

    Launched.end = watched  # type: ignore[method-assign]
    try:
        yield records
    finally:
        Launched.end = end  # type: ignore[method-assign]


def visible(engine: Engine) -> int:
    """Returns the number of new tokens of the first row that the device has written so far."""
    output = engine._rows.output[0, 3:]
    return int(np.argmax(output == NO_TOKEN)) if (output == NO_TOKEN).any() else len(output)


NEWS: dict[str, Callable[[Engine, Listener], None]] = {
    "a request arrives": lambda engine, heard: engine.submit(long("b", 3), heard),
    "the request is cancelled": lambda engine, _: engine.cancel("a"),
    "the engine is closed": lambda engine, _: engine.close(),
}


def ends_early(small: Checkpoint, news: str) -> bool:
    """Sets the word that ends a launch after the first token of a long launch. Returns False if the
    device had finished by then.
    """
    heard, seen = Listener(), [0]
    with opened(small) as engine, launches() as records:

        def tells(event: Event) -> None:
            first = not heard.tokens.get("a")
            heard(event)
            if first and event.tokens:
                NEWS[news](engine, heard)
                seen[0] = visible(engine)

        engine.submit(long("a"), tells)
        heard.wait("a", *(["b"] if news == "a request arrives" else []))
    (step, done), *others = records
    assert done <= seen[0] + 1
    if news == "a request arrives":
        assert len(heard.tokens["b"]) == 3
    elif done < step.iterations:
        assert heard.finish["a"] == FinishReason.CANCELLED and not others
    if done < step.iterations and news == "a request arrives":
        assert [p.request.id for p in others[0][0].rows] == ["a", "b"]
    return done < step.iterations


@pytest.mark.parametrize("news", NEWS)
def test_requests_and_cancellations_end_a_launch_after_an_iteration(
    small: Checkpoint, news: str
) -> None:
    early = any(ends_early(small, news) for _ in range(MAX_ATTEMPTS))
    assert early, "the device was faster than the host"


def test_request_ends_in_the_iteration_of_its_cancellation(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch that begins after a request was cancelled has one iteration: a chunk of its prompt,
    or a token.
    """
    start, heard = DeviceRows.start, Listener()
    with opened(small, chunk=4) as engine:

        def started(rows: DeviceRows, step: Step) -> Launched:
            engine.cancel(step.rows[0].request.id)
            return start(rows, step)

        monkeypatch.setattr(DeviceRows, "start", started)
        for name, prompt in {"a": PROMPT, "b": PROMPT[:1]}.items():
            engine.submit(Request(name, prompt, long(name).sampling), heard)
            heard.wait(name)
    launches = engine.stats().launches
    assert set(heard.finish.values()) == {FinishReason.CANCELLED}
    assert [(one.chunks, one.iterations) for one in launches] == [(1, 0), (0, 1)]
    assert not heard.tokens["a"] and len(heard.tokens["b"]) == 1


def test_prompt_continues_after_each_chunk(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts do not depend on the iteration at which the host ends a launch."""
    given, read = random_requests(6, most=24), Request("long", PROMPT, long("a", 5).sampling)
    wanted = {**solo_texts(small, given), "long": solo(small, read)}
    heard, start = Listener(), DeviceRows.start

    def started(rows: DeviceRows, step: Step) -> Launched:
        rows.leave()
        return start(rows, step)

    with opened(small, chunk=4, slots=3) as engine:
        monkeypatch.setattr(DeviceRows, "start", started)
        for request in (read, *given):
            engine.submit(request, heard)
        heard.wait(*wanted)
    launches = engine.stats().launches
    assert heard.tokens == wanted and not any(heard.errors.values())
    assert all(one.chunks + one.iterations == 1 for one in launches)
    assert all(one.time_us for one in launches)


def test_records_of_launches(small: Checkpoint) -> None:
    """The engine reports what each launch has computed, and its time by the device's clock."""
    heard, begin_s, tokens = Listener(), time.monotonic(), 400
    with opened(small, chunk=4, slots=4) as engine:
        engine.submit(Request("a", PROMPT, long("a", tokens).sampling), heard)
        heard.wait("a")
    took_s = time.monotonic() - begin_s
    launches = engine.stats().launches
    assert sum(one.chunks for one in launches) == -(-(len(PROMPT) - 1) // 4)
    assert sum(one.iterations for one in launches) == engine.stats().iterations == tokens
    assert {(one.chunk_rows, one.form, one.rows) for one in launches} == {(4, 1, 1)}
    times = [(one.time_us or 0.0, one.chunk_us or 0.0) for one in launches]
    assert 0 < sum(us for us, _ in times) < 1e6 * took_s
    assert all(0 <= part < us for us, part in times)


def test_time_of_chunks_is_the_rest_of_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch of three chunks and five iterations takes ten seconds, and tokens of two iterations
    are read after seven, so that an iteration takes one second.
    """
    monkeypatch.setattr("ark.serving.rows.time.monotonic", lambda: 110.0)
    rows = object.__new__(DeviceRows)

    def recorded(done: Done, first: tuple[float, int] | None) -> float | None:
        rows.launches = (LaunchRecord(100.0, 3, 4, 5, 1, 1),)
        rows.record(done, 8e6, first)
        (launch,) = rows.launches
        assert (launch.chunks, launch.iterations, launch.time_us) == (*astuple(done), 8e6)
        return launch.chunk_us

    assert recorded(Done(3, 5), (107.0, 2)) == pytest.approx(4e6)
    assert recorded(Done(3, 5), None) is None is recorded(Done(3, 2), (107.0, 2))
    assert (recorded(Done(2, 0), None), recorded(Done(0, 5), (107.0, 2))) == (8e6, 0.0)


def test_free_row_ends_a_launch_for_those_that_wait(small: Checkpoint) -> None:
    """A stop token that only the host checks ends a long launch and frees the only slot for a
    waiting request.
    """
    text = solo(small, long("a", 64))
    stop = next(token for token in text[8:] if token not in text[:8])
    how = SamplingParams(temperature=0.0, max_tokens=None)

    def leaves() -> bool:
        heard = Listener()
        with opened(small, slots=1) as engine, launches() as records:
            engine.submit(Request("a", (3, 4, 5), how, frozenset({stop})), heard)
            engine.submit(long("b", 4), heard)
            heard.wait("a", "b")
        assert heard.tokens["a"] == text[: text.index(stop) + 1]
        assert heard.tokens["b"] == text[:4]
        return sum(done for _, done in records) < MAX_POSITIONS // 2

    assert any(leaves() for _ in range(MAX_ATTEMPTS)), "the device was faster than the host"


def solo(small: Checkpoint, request: Request) -> list[int]:
    """Returns the text of a request served by launches of one iteration."""
    heard = Listener()
    with opened(small, iterations=1) as engine:
        engine.submit(request, heard)
        heard.wait(request.id)
    return heard.tokens[request.id]


def test_fewer_rows_take_a_smaller_form(small: Checkpoint) -> None:
    """When one of two requests ends, the launch of two rows ends, and a launch of one row
    follows.
    """

    def leaves() -> bool:
        heard = Listener()
        with opened(small) as engine, launches() as records:
            engine.submit(long("a"), heard)
            engine.submit(long("b", 8), heard)
            heard.wait("a", "b")
        assert heard.tokens["b"] == heard.tokens["a"][:8]
        return len(records[-1][0].rows) == 1

    assert any(leaves() for _ in range(MAX_ATTEMPTS)), "the device was faster than the host"


def test_stalled_host_does_not_stop_the_device(small: Checkpoint) -> None:
    """A host that stalls for longer than any timeout on the device does not disturb a
    long launch.
    """
    given = random_requests(6, most=40)
    wanted, heard = solo_texts(small, given), Listener()
    with opened(small, budget_s=0.5, slots=3) as engine:

        def tells(event: Event) -> None:
            heard(event)
            if event.id == given[0].id and len(heard.tokens[event.id]) < 3:
                time.sleep(1.5)

        for request in given:
            engine.submit(request, tells)
        heard.wait(*wanted)
    assert heard.tokens == wanted and not any(heard.errors.values())


def test_tokens_are_reported_while_the_launch_runs(small: Checkpoint) -> None:
    """One launch generates all tokens of a request, and the listener gets them one by one."""
    heard, portions = Listener(), []
    with opened(small) as engine, launches() as records:

        def tells(event: Event) -> None:
            portions.append(len(event.tokens))
            heard(event)

        engine.submit(long("a"), tells)
        heard.wait("a")
    assert sum(portions) == MAX_POSITIONS - 3 and len(portions) > 3
    assert len(records) == 1 and records[0][1] == MAX_POSITIONS - 3


def test_calls_of_a_closed_engine_do_nothing(small: Checkpoint) -> None:
    """Calls of a closed engine do not write to freed memory, such as the word that ends a
    launch.
    """
    engine = opened(small)
    word = engine._rows._leave
    engine.close()
    assert engine._rows._leave is not word
    for _ in range(2):
        engine.cancel("a")
        engine.close()
