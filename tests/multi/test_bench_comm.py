"""`ark bench comm`: sizes and refusals, and real measurements of collectives between CPU ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ark.cli import main
from ark.cli.bench_comm import sizes
from ark.cli.measure.comm import COLLECTIVES, bus_factor, wrong_elements
from ark.cli.measure.results import read
from ark.errors import InvalidUsageError
from tests.slow import slow


def test_sizes_rise_by_a_factor() -> None:
    assert sizes("1K:64K", 4) == [1024, 4096, 16384, 65536]
    assert sizes("3", 2) == [3]
    assert sizes("1M:3M", 2) == [1 << 20, 2 << 20]


@pytest.mark.parametrize("text", ["", "K", "4K:1K", "-1", "1T", "99999G", "1.5K", "0"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(InvalidUsageError, match="size"):
        sizes(text, 2)


@pytest.mark.parametrize(
    "words",
    [
        ["comm", "gather_all", "--ranks", "2"],
        ["comm", "all_reduce"],
        ["comm", "all_reduce", "--ranks", "2", "--svg", "x.svg"],
        ["comm", "all_reduce", "--ranks", "2", "--type", "int3"],
        ["comm", "all_reduce", "--ranks", "2", "--way", "alone", "--algorithm", "ring"],
    ],
)
def test_bad_calls_end_with_a_sentence(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *words, "--backend", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("ark: ") and "Traceback" not in errors


def test_bus_bandwidth_is_the_rate_of_a_link() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == 0.75
    assert bus_factor("broadcast", 4) == 1.0


def test_wrong_elements_are_counted() -> None:
    values = [np.arange(6, dtype=np.float32), np.ones(6, np.float32)]
    total = values[0] + values[1]
    assert wrong_elements("all_reduce", values, 0, total, "sum") == 0
    assert wrong_elements("all_reduce", values, 0, total + np.array([0, 0, 1, 0, 0, 9]), "sum") == 2
    assert wrong_elements("all_to_all", values, 1, np.array([3, 4, 5, 1, 1, 1.0]), None) == 0
    assert wrong_elements("all_to_all", values, 0, np.array([3, 4, 5, 1, 1, 1.0]), None) == 3


@pytest.mark.parametrize(
    ("way", "peer"),
    [
        ("alone", ""),
        pytest.param("alone", "gloo", marks=slow),
        pytest.param("graph", "", marks=slow),
    ],
)
def test_every_collective_is_measured_and_right(way: str, peer: str, tmp_path: Path) -> None:
    out, chart = tmp_path / "figures.json", tmp_path / "chart.svg"
    names = COLLECTIVES if way == "graph" else COLLECTIVES[:2]
    words = ["bench", "comm", *names, "--ranks", "2", "--backend", "cpu", "--way", way]
    words += ["--sizes", "2K", "--repeats", "1", "--json", str(out)]
    if peer:
        pytest.importorskip("torch.distributed")
        words += ["--vs", peer, "--svg", str(chart)]
    assert main(words) == 0
    rows = [row.detail for row in read(out).figures]
    assert [r["collective"] for r in rows] == [*names]
    for row in rows:
        assert row["wrong"] == 0 and row["seconds"] > 0 and row["ranks"] == 2
        assert row["busbw_gbps"] == pytest.approx(
            row["algbw_gbps"] * bus_factor(row["collective"], 2)
        )
        assert (row["peer_seconds"] or 0) >= 0
    if peer:
        assert chart.read_text().startswith("<svg")
