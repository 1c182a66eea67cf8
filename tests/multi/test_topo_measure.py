"""`ark topo measure` between real ranks on the CPU: a topology that is read and simulated."""

from __future__ import annotations

from pathlib import Path

import pytest

from ark.cli import main
from ark.comm.topology import load


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
