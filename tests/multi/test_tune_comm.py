"""`ark tune --collectives`: measurements are stored, and checked when they are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli import main
from ark.cli.measure.comm import COLLECTIVES
from ark.distributed import functions
from ark.distributed.calls import plans_for
from ark.runtime import cache
from ark.runtime import tuned_collectives as tuned
from ark.runtime.rank_info import rank_from_environment
from ark.runtime.tuned_collectives import Entry

MACHINE = registry.machine("cpu-2")
TABLE = {
    "all_reduce.2": [
        Entry(1024, "ring", "packet", 2.0, 3.0),
        Entry(65536, "two_shot", "threads", 5.0, 7.0),
    ]
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path))


def test_kept_choices_are_read_back() -> None:
    assert tuned.KEPT.load(MACHINE) == {}
    tuned.KEPT.store(MACHINE, TABLE)
    assert tuned.KEPT.load(MACHINE) == TABLE
    tuned.KEPT.forget(MACHINE)
    assert tuned.KEPT.load(MACHINE) == {}


def test_nearest_size_is_used_within_a_factor_of_two() -> None:
    def picked(nbytes: int, collective: str = "all_reduce", world: int = 2) -> str | None:
        actual = tuned.pick(TABLE, collective, world, nbytes)
        return actual and actual.algorithm

    assert [picked(n) for n in (512, 1024, 2048)] == ["ring"] * 3
    assert [picked(n) for n in (32768, 131072)] == ["two_shot"] * 2
    assert [picked(n) for n in (1, 511, 2049, 32767, 131073)] == [None] * 5
    assert picked(1024, "all_gather") is None and picked(1024, world=3) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"format": 2, "machine": "", "choices": {}}',
        b'{"format": 1, "machine": "", "choices": {"all_reduce": []}}',
        b'{"format": 1, "machine": "", "choices": {"all_reduce.2": [{"nbytes": 0}]}}',
        b'{"format": 1, "machine": "", "choices": {"a.2": [{"nbytes": 1, "algorithm": "rm -r", '
        b'"engine": "dma", "us": 1, "usual_us": 1}]}}',
    ],
)
def test_damaged_file_is_named_and_left(data: bytes, capsys: pytest.CaptureFixture) -> None:
    cache.store(cache.TUNED, tuned.KEPT.key(MACHINE), data)
    assert tuned.KEPT.load(MACHINE) == {}
    assert "ark tune --collectives" in capsys.readouterr().err


def _sums_by_tables(root: str) -> None:
    """The body of a rank for the test below: it uses the tables of rank 0, although it
    has its own.
    """
    ranks = rank_from_environment()
    os.environ["ARK_CACHE_DIR"] = str(Path(root) / str(ranks.rank))
    ark.init(backend="cpu")
    results = {}
    for count in (256, 70001):
        total = ark.distributed.all_reduce(np.full(count, ranks.rank + 1, np.float32))
        assert (total == 3.0).all()
    group = functions.group()
    for call in group._calls[group._all_ranks].values():
        chosen = call.key
        wanted = plans_for(chosen, 2, group._device.machine)[ranks.rank]
        assert call.executor.plan.ops == wanted.ops
        results[str(chosen.elements)] = [chosen.algorithm, chosen.engine]
    (Path(root) / f"took{ranks.rank}.json").write_text(json.dumps(results))


def test_all_ranks_use_the_measurements_of_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks use the measurements of rank 0: if their tables differ, and for a size that was not
    measured.
    """
    words = ["--ranks", "2", "--backend", "cpu", "--sizes", "1K", "--repeats", "1"]
    command = [sys.executable, "-m", "ark", "tune", "--collectives", "all_reduce", *words]
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "0"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "one_shot, packet" in done.stderr and "ring, threads" in done.stderr
    device = registry.get("cpu").open(0)
    (entry,) = tuned.KEPT.load(device.machine)["all_reduce.2"]
    assert entry.nbytes == 1024 and 0 < entry.us <= entry.usual_us
    assert set(entry.engines) >= {"one_shot", "two_shot", "ring"}
    assert set(entry.engines.values()) <= {"packet", "threads"}
    monkeypatch.setenv("ARK_CACHE_DIR", str(tmp_path / "1"))
    other = "ring" if entry.algorithm != "ring" else "two_shot"
    tuned.KEPT.store(device.machine, {"all_reduce.2": [Entry(1024, other, "threads", 1.0, 2.0)]})
    device.close()
    assert ark.launch(2, _sums_by_tables, str(tmp_path)) == 0
    for rank in range(2):
        chosen = json.loads((tmp_path / f"took{rank}.json").read_text())
        assert chosen == {"256": [entry.algorithm, entry.engine], "70001": ["auto", "auto"]}


@pytest.mark.parametrize("words", [["gather"], []])
def test_bad_calls_end_with_a_sentence(words: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["tune", "--collectives", *words, "--backend", "cpu"]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("ark: ") and ("--ranks" in errors or COLLECTIVES[0] in errors)
