"""`ark bench serve` against a server whose engine generates a token every 5 ms."""

from __future__ import annotations

import fcntl
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ark.cli import bench_serve, main
from ark.cli.measure import results
from ark.cli.measure.serve import (
    Ask,
    Outcome,
    Target,
    asks,
    first_model,
    load,
    percentiles,
    summary,
)
from ark.cli.measure.serve_chart import TOP_PX
from ark.errors import BaseError
from ark.serving.http.run import Options
from tests.server.running import NOAH, Running, noah_model, running
from tests.server.stand_in import CountingEngine
from tests.slow import slow


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_equal_numpy(values: list[float]) -> None:
    expected = np.percentile(values, [50, 90, 99], method="inverted_cdf")
    assert list(percentiles(values).values()) == expected.tolist()


def test_requests_arrive_at_the_rate_and_have_the_lengths_asked_for() -> None:
    listed = asks(3000, 8.0, 20, 50, seed=3)
    gaps = np.diff([ask.at_s for ask in listed])
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.1)
    assert np.mean([len(ask.prompt.split()) for ask in listed]) == pytest.approx(20, rel=0.1)
    assert np.mean([ask.max_tokens for ask in listed]) == pytest.approx(50, rel=0.1)
    assert listed == asks(3000, 8.0, 20, 50, seed=3) != asks(3000, 8.0, 20, 50, seed=4)
    assert {ask.at_s for ask in asks(5, math.inf, 10, 10, seed=0)} == {0.0}


@pytest.mark.parametrize("chat", [False, True])
def test_load(server: Running, engine: CountingEngine, chat: bool) -> None:
    engine.step_s = 0.005
    target = Target(server.url, "noah", chat=chat)
    assert first_model(target) == "noah"
    listed = [Ask(0.0, "the king", count) for count in (1, 8, 30, 40, 5000)]
    outcomes = load(target, listed, {"temperature": 0})
    assert [one.tokens for one in outcomes] == [1, 8, 30, 40, 0]
    assert "5,000 more were asked for" in outcomes[4].error
    for ask, one in zip(listed[:4], outcomes, strict=False):
        # The engine takes at least 5 ms for a token, and pieces of text may be merged.
        assert one.first_s > 0 and len(one.gaps_s) < ask.max_tokens
        assert one.whole_s >= one.first_s + sum(one.gaps_s) - 1e-6
        assert one.whole_s >= 0.005 * (ask.max_tokens - 1)
    whole = summary(math.inf, listed, outcomes, first_goal_s=1e-9)
    assert (whole.requests, whole.failed, whole.tokens, whole.goodput) == (5, 1, 79, 0)
    assert whole.prompt_tokens == sum(one.prompt_tokens for one in outcomes) > 0
    assert whole.tokens_per_s == pytest.approx(79 / whole.seconds)


def test_command(
    engine: CountingEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(engine, noah_model(128), Options(keys=("key",))) as server:
        words = ["bench", "serve", "--url", f"{server.url}/v1", "--requests", "6"]
        words += ["--prompt", "5", "--tokens", "5", "--rate", "100,inf"]
        assert main([*words, "--api-key", "key", "--json", str(tmp_path / "out.json")]) == 0
        written = results.read(tmp_path / "out.json")
        names = [row.figure for row in written.figures]
        assert "serve/noah-rate-100-first-p50" in names and len(names) == len(set(names)) == 24
        assert written.figures[0].detail["requests"] == 6
        assert "6 requests" in capsys.readouterr().out
        assert main([*words, "--api-key", "other"]) == 2
        assert "401" in capsys.readouterr().err


def test_chart_of_two_rates(
    server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The SVG is XML, has a point for each percentile, and the longest time is highest."""
    file = tmp_path / "chart.svg"
    words = ["bench", "serve", "--url", server.url, "--requests", "4", "--rate", "50,inf"]
    words += ["--prompt", "5", "--tokens", "5", "--first-goal", "1000", "--svg", str(file)]
    assert main(words) == 0
    root = ElementTree.parse(file).getroot()
    circles = root.findall("{*}circle")
    texts = [element.text or "" for element in root.findall("{*}text")]
    assert len(circles) == 2 * 2 * 3 and len(root.findall("{*}polyline")) == 6
    assert sum(text.endswith("good/s") for text in texts) == 4
    assert min(float(circle.get("cy", "0")) for circle in circles) == TOP_PX
    assert {"50/s", "inf/s"} <= set(texts)


def test_directory_and_a_url_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", str(NOAH), "--url", "http://127.0.0.1:9"]) == 2
    assert "give one of them" in " ".join(capsys.readouterr().err.split())


def test_servers_start_before_they_are_measured(
    server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Benches that share a device take turns by a lock file. `ark bench serve` holds the lock while
    it sends requests, and not while its server starts.
    """
    turn, free = tmp_path / "turn", []

    def look() -> None:
        with turn.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free.append(False)
            else:
                free.append(True)

    @contextmanager
    def started(directory: str, options: Sequence[str]) -> Iterator[str]:
        look()
        yield server.url
        look()

    def sent(*given: Any) -> list[Outcome]:
        look()
        return load(*given)

    monkeypatch.setattr(bench_serve, "own_server", started)
    monkeypatch.setattr(bench_serve, "load", sent)
    words = ["bench", "serve", str(NOAH), "--requests", "2", "--tokens", "2"]
    assert main([*words, "--turn", str(turn)]) == 0
    assert free == [True, False, True]


@slow
@pytest.mark.timeout(300)
def test_shipped_checkpoint(tmp_path: Path) -> None:
    out = str(tmp_path / "out.json")
    words = ["bench", "serve", str(NOAH), "--backend", "cpu", "--requests", "3", "--tokens", "4"]
    assert main([*words, "--ignore-eos", "--json", out]) == 0
    written = results.read(tmp_path / "out.json")
    assert (written.machine.backend, written.machine.devices) == ("cpu", 1)
    first = written.figures[0]
    assert first.figure == "serve/noah-rate-inf-first-p50" and first.detail["failed"] == 0


def test_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--url", "http://127.0.0.1:9"]) == 2
    assert "does not answer" in capsys.readouterr().err
    with pytest.raises(BaseError, match="URL"):
        first_model(Target("ftp://x", "m"))


def test_another_server_without_usage_is_counted_by_pieces(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ark.serving.http.choices import Answer

    monkeypatch.setattr(Answer, "usage", lambda self: None)
    (one,) = load(Target(server.url, "noah"), [Ask(0.0, "the king", 8)], {})
    assert not one.error and 1 <= one.tokens <= 8 and json.dumps(one.gaps_s)
