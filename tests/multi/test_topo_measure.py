"""`ark topo measure` between real ranks on the CPU: the resulting topology is read and
simulated.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ark.cli import main
from ark.collective.topology import load
from tests.slow import slow


def test_two_ranks_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    file = tmp_path / "here.json"
    words = ["topo", "measure", "--ranks", "2", "--repeats", "1", "--backend", "cpu"]
    assert main([*words, "--out", str(file)]) == 0
    topology = load(str(file))
    assert len(topology.links) == 2 and all(link.bandwidth > 0 for link in topology.links)
    assert topology.costs is not None
    assert {p.name for p in topology.costs.protocols} == {"packet", "threads"}
    assert max(p.share for p in topology.costs.protocols) == 1
    assert min(p.latency_us for p in topology.costs.protocols) == 0
    assert "GB/s each way" in capfd.readouterr().out
    words = ["topo", "simulate", str(file), "--collective", "all_reduce", "--size", "4K"]
    assert main(words) == 0


@slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [4, 8])
def test_every_pair_of_more_ranks_is_measured(ranks: int, tmp_path: Path) -> None:
    """`ark topo measure` of several ranks measures every pair in one job. Programs for the measured
    links run and give right sums.
    """
    file, figures = tmp_path / "here.json", tmp_path / "figures.json"
    words = ["--ranks", str(ranks), "--backend", "cpu", "--repeats", "1"]
    assert main(["topo", "measure", *words, "--out", str(file)]) == 0
    topology = load(str(file))
    assert len(topology.links) == ranks * (ranks - 1)
    # With the noise of 56 links there are so many trees that planning takes minutes.
    for algorithm in ("forestcoll", "ring") if ranks == 4 else ("ring",):
        how = ["--algorithm", algorithm, "--topology", str(file), "--json", str(figures)]
        assert main(["bench", "comm", "all_reduce", *words, "--sizes", "64K", *how]) == 0
        (row,) = json.loads(figures.read_text())["rows"]
        assert (row["algorithm"], row["wrong"], row["ranks"]) == (algorithm, 0, ranks)
        assert row["predicted_seconds"] > 0
