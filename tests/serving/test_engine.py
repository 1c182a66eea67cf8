"""The engine on a device: requests give the ids that they give when served alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ark.errors import GpuError, InvalidUsageError
from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.rows import DeviceRows
from ark.serving.scheduler import forms_of
from ark.serving.types import Event, FinishReason, Request
from tests.checkpoints import make_checkpoint
from tests.serving.requests import MAX_POSITIONS, Listener, random_requests, settled, solo_texts


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("small")
    return Checkpoint.open(make_checkpoint(directory, layers=2, hidden=32, intermediate=48))


@pytest.fixture(scope="module")
def wanted(small: Checkpoint) -> dict[str, list[int]]:
    return solo_texts(small, random_requests(24))


WAYS = {
    "chunks": {},
    "token by token": {"chunk": 0},
    "pages that run out": {"pages": 9},
    "chunks that are not whole pages": {"chunk": 5, "page": 4},
    "one slot": {"slots": 1},
    "one slot that reads prompts and samples by all fields": {
        "slots": 1,
        "chunk": 0,
        "sampling": "full",
    },
    "drafts": {"draft": 3, "pages": 12},
    "an iteration a launch": {"iterations": 1, "pages": 9},
}


@pytest.fixture(params=WAYS)
def engine(request: pytest.FixtureRequest, small: Checkpoint) -> Iterator[Engine]:
    asked = {"slots": 4, "context": MAX_POSITIONS, "page": 8, **WAYS[request.param]}
    with Engine.open(small, "cpu", budget_s=20.0, **asked) as opened:
        yield opened


def test_requests_give_the_ids_of_their_solo_runs(
    engine: Engine, wanted: dict[str, list[int]]
) -> None:
    """Requests arrive one by one while others run. At the end all slots and pages are free."""
    listener = Listener()
    given = random_requests(24)
    for number, request in enumerate(given):
        engine.submit(request, listener)
        if number % 5 == 4:
            listener.wait(given[number - 4].id, tokens=1)
    listener.wait(*(request.id for request in given))
    assert listener.tokens == wanted
    for request in given:
        stopped = wanted[request.id][-1] in request.stop_token_ids
        want = FinishReason.STOP if stopped else FinishReason.LENGTH
        assert listener.finish[request.id] == want
    engine.close()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_pages) == (0, 0, stats.pages)
    assert stats.generated_tokens == sum(map(len, wanted.values()))
    assert stats.prompt_tokens == sum(len(request.prompt) for request in given)
    assert stats.slot_ids == ("",) * stats.slots
    assert stats.pages != 9 or stats.preemptions > 0


@pytest.fixture(scope="module")
def shared(small: Checkpoint) -> Iterator[Engine]:
    """Yields one engine with two slots, for tests that leave it idle."""
    asked = {"slots": 2, "context": MAX_POSITIONS, "page": 8, "chunk": 8, "iterations": 1}
    with Engine.open(small, "cpu", **asked) as opened:  # type: ignore[arg-type]
        yield opened


def greedy(most: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=most)


def long(request_id: str, first: int = 3) -> Request:
    """Returns a request that fills the context."""
    return Request(request_id, (first, 4, 5), greedy(None))


def test_requests_are_cancelled_in_each_state(shared: Engine, small: Checkpoint) -> None:
    """Requests are cancelled while they decode, while they wait, and on arrival. The other requests
    are served as usual.
    """
    wanted = solo_texts(small, [replace(long("b"), sampling=greedy(64))])["b"]
    for _ in range(5):
        listener = Listener()
        for name in ("a", "b", "waits", "arrives"):
            shared.submit(long(name), listener)
            if name == "b":
                listener.wait("a", tokens=1)
        for name in ("waits", "a", "arrives", "unknown"):
            shared.cancel(name)
        listener.wait("a", "b", "waits", "arrives")
        assert listener.finish.pop("b") == FinishReason.LENGTH
        assert set(listener.finish.values()) == {FinishReason.CANCELLED}
        assert listener.tokens["b"] == wanted
        assert listener.tokens["a"] == wanted[: len(listener.tokens["a"])]
        assert listener.tokens["waits"] == []
    settled(shared)


def test_known_beginning_is_not_computed_again(shared: Engine) -> None:
    listener, before = Listener(), shared.stats().cached_prompt_tokens
    prompt = tuple(range(100, 140))
    for name in ("first", "second"):
        shared.submit(Request(name, (*prompt, 7), greedy(4)), listener)
        listener.wait(name)
    assert shared.stats().cached_prompt_tokens - before == 40
    assert listener.tokens["first"] == listener.tokens["second"]


def test_threads_submit_together(shared: Engine, wanted: dict[str, list[int]]) -> None:
    listener = Listener()
    threads = [
        threading.Thread(target=shared.submit, args=(request, listener))
        for request in random_requests(24)
    ]
    for thread in threads:
        thread.start()
    listener.wait(*wanted)
    assert listener.tokens == wanted


def test_listener_that_raises_ends_its_request_alone(
    shared: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = Listener()

    def raises(event: Event) -> None:
        listener(event)
        if event.finish is None:
            raise RuntimeError("no disk")

    shared.submit(long("raises"), raises)
    shared.submit(long("goes on", first=8), listener)
    listener.wait("raises", "goes on")
    assert listener.finish["raises"] == FinishReason.CANCELLED
    assert listener.finish["goes on"] == FinishReason.LENGTH
    assert "'raises' raised RuntimeError('no disk')" in capsys.readouterr().err


@pytest.mark.parametrize("sampling", ["", "full"])
def test_drafts_of_a_text_that_repeats_itself_save_iterations(
    small: Checkpoint, sampling: str
) -> None:
    """Drafts from earlier text: greedy texts that repeat parts of themselves, and a sampled one,
    equal those of solo runs.
    """
    sampled = SamplingParams(temperature=0.5, seed=3, max_tokens=50)
    given = [Request(f"greedy {n}", (3, 4, 5 + n), greedy(60)) for n in range(3)]
    given.append(Request("sampled", (3, 4, 5), sampled))
    texts, listener = solo_texts(small, given), Listener()
    asked: dict[str, Any] = {"slots": 4, "context": MAX_POSITIONS, "page": 8, "draft": 3}
    asked["sampling"] = sampling
    with Engine.open(small, "cpu", **asked) as engine:  # type: ignore[arg-type]
        for request in given:
            engine.submit(request, listener)
            listener.wait(request.id)
        stats = engine.stats()
    assert listener.tokens == texts
    assert stats.iterations < 0.9 * stats.generated_tokens


REFUSED = [
    ((), {}, "the prompt has no tokens"),
    ((1, 320), {}, "the token 320, but the vocabulary has 320"),
    (tuple(range(MAX_POSITIONS)), {}, "the prompt has 64 tokens, but the context holds 64"),
    ((1.5,), {}, "1.5 is not a whole number"),
    ((1,), {"n": 2}, "n=2 is out of range; submit a request for each sample"),
]


@pytest.mark.parametrize(("prompt", "sampling", "words"), REFUSED)
def test_requests_that_cannot_be_served_are_refused(
    shared: Engine, prompt: tuple, sampling: dict, words: str
) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        shared.submit(Request("refused", prompt, SamplingParams(**sampling)), print)


def test_id_is_served_once_at_a_time(shared: Engine) -> None:
    listener = Listener()
    shared.submit(long("twice"), listener)
    with pytest.raises(InvalidUsageError, match="'twice' is being served"):
        shared.submit(long("twice"), listener)
    shared.cancel("twice")
    listener.wait("twice")
    shared.submit(long("twice"), Listener())
    shared.cancel("twice")


def test_listener_may_submit_and_cancel(shared: Engine) -> None:
    """A listener, which the engine's thread calls, may submit and cancel requests."""
    listener = Listener()

    def goes_on(event: Event) -> None:
        listener(event)
        if event.id == "first" and event.finish is not None:
            shared.submit(long("second"), goes_on)
        elif event.id == "second" and event.finish is None:
            shared.cancel("second")

    shared.submit(Request("first", (3, 4), greedy(2)), goes_on)
    listener.wait("first", "second")
    assert listener.finish["second"] == FinishReason.CANCELLED
    assert 0 < len(listener.tokens["second"]) < MAX_POSITIONS - 3


@pytest.mark.parametrize("drain", [True, False])
def test_close_ends_requests(small: Checkpoint, drain: bool) -> None:
    listener = Listener()
    engine = Engine.open(small, "cpu", slots=2, context=MAX_POSITIONS, page=8, chunk=8)
    for number in range(5):
        engine.submit(long(str(number)), listener)
    engine.close(drain)
    engine.close()
    wanted = FinishReason.LENGTH if drain else FinishReason.CANCELLED
    assert set(listener.finish.values()) == {wanted} and len(listener.finish) == 5
    with pytest.raises(InvalidUsageError, match="this engine was closed"):
        engine.submit(long("late"), listener)


def test_listener_may_close_the_engine(small: Checkpoint) -> None:
    """If a listener, which the engine's thread calls, closes the engine, the thread ends after the
    step.
    """
    listener = Listener()
    asked: dict[str, Any] = {"slots": 2, "context": MAX_POSITIONS, "chunk": 0}
    engine = Engine.open(small, "cpu", **asked)

    def closes(event: Event) -> None:
        engine.close()
        listener(event)

    engine.submit(long("goes on"), listener)
    engine.submit(Request("closes", (3, 4), greedy(3)), closes)
    listener.wait("goes on")  # the device may finish before the host checks
    assert set(listener.finish.values()) <= {FinishReason.CANCELLED, FinishReason.LENGTH}
    engine.close()


def test_failing_device_ends_every_request(
    small: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the kernel reads a page number outside of the pool, every request ends with the error's
    message.
    """
    listener = Listener()
    asked = {"slots": 2, "context": MAX_POSITIONS, "page": 8, "chunk": 8, "iterations": 1}
    reasons: list[str] = []
    with Engine.open(small, "cpu", **asked) as engine:  # type: ignore[arg-type]
        engine.on_failure = reasons.append
        write = DeviceRows._write

        def broken(rows: DeviceRows, name: str, values: np.ndarray) -> None:
            write(rows, name, values + 1000 if name == "pages" else values)

        for name in ("a", "b", "waits"):
            engine.submit(long(name), listener)
        listener.wait("a", tokens=2)
        monkeypatch.setattr(DeviceRows, "_write", broken)
        listener.wait("a", "b", "waits")
        assert set(listener.finish.values()) == {FinishReason.ERROR}
        assert all("out of range" in error for error in listener.errors.values())
        with pytest.raises(GpuError, match=r"the engine has failed.*out of range"):
            engine.submit(long("late"), listener)
        assert engine.stats().running == engine.stats().waiting == 0
    (reason,) = reasons
    assert "out of range" in reason


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"slots": 0}, "slots=0 is out of range; expected 1 to 64"),
        ({"iterations": 0}, "iterations=0 is out of range; expected 1 to 65536"),
        ({"draft": 64}, "draft=64 is out of range"),
        ({"page": 0}, "page=0 is out of range"),
        ({"context": 64, "page": 8, "pages": 7}, "a request of 64 positions needs 8 pages of 8"),
        ({"context": 10**6}, "the checkpoint allows 1 to 128"),
    ],
)
def test_engines_that_cannot_be_are_refused(small: Checkpoint, asked: dict, words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        Engine.open(small, "cpu", **asked)


def test_forms_are_powers_of_two_and_all_slots() -> None:
    assert [forms_of(n) for n in (1, 2, 3, 8, 12)] == [
        (1,),
        (1, 2),
        (1, 2, 3),
        (1, 2, 4, 8),
        (1, 2, 4, 8, 12),
    ]
