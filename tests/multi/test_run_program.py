"""`ark.distributed.run_program`: execution plans from files (MSCCL++), run on arrays of the
caller.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import ark
from ark.distributed.arrays import HostArray
from tests.cases import execution_plans as plans

RANK_COUNT = 2


def plans_on_arrays(folder: str) -> None:
    """The body of each rank: runs each plan file of a folder on arrays of two sizes, the second
    time in place.
    """
    ark.init(backend="cpu")
    rank, random = ark.Model.get_rank(), np.random.default_rng(3)
    run = ark.distributed.run_program
    for size in (24, 4096):
        xs = random.integers(-9, 9, (RANK_COUNT, size)).astype(np.float32)
        own = xs[rank].copy()
        for name, want in (
            ("packets", xs.sum(0)),
            ("largest", xs.max(0)),
            ("slices", xs.reshape(-1)),
            ("switch", xs.min(0)),
            ("shift", xs[rank - 1]),
            ("exchange", np.concatenate([np.split(x, RANK_COUNT)[rank] for x in xs])),
        ):
            path = Path(folder, name)
            np.testing.assert_array_equal(run(path, own), want, name)
            np.testing.assert_array_equal(own, xs[rank])
            if name != "slices":
                held = own.copy()
                assert run(str(path), held, out=held) is held
                np.testing.assert_array_equal(held, want, name)
    with pytest.raises(ark.InvalidUsageError, match="is for 3 ranks; expected equal parts for"):
        run(Path(folder, "three"), own)
    with pytest.raises(ark.InvalidUsageError, match="cannot be read"):
        run(Path(folder, "missing"), own)
    with pytest.raises(ark.InvalidUsageError, match="not divisible by 2 ranks"):
        run(Path(folder, "exchange"), own[:3])


def test_plan_files_run_on_arrays(tmp_path: Path) -> None:
    for name, text in {
        "packets": plans.reduced_by_packets(RANK_COUNT),
        "largest": plans.reduced_by_packets(RANK_COUNT, "max"),
        "slices": plans.gathered_in_slices(RANK_COUNT),
        "switch": plans.reduced_by_the_switch(RANK_COUNT, "min"),
        "exchange": plans.exchanged_in_place(RANK_COUNT),
        "shift": plans.shifted(RANK_COUNT),
        "three": plans.exchanged_in_place(3),
    }.items():
        (tmp_path / name).write_text(text)
    assert ark.launch(RANK_COUNT, plans_on_arrays, str(tmp_path)) == 0


def in_place(folder: str) -> None:
    """The body of each rank: programs read and write registered memory without a copy, also parts
    of it that overlap.
    """
    ark.init(backend="cpu")
    rank, group = ark.Model.get_rank(), ark.distributed.group()
    memory = group.register(np.zeros(4 * 1024, np.float32))
    copies: list[str] = []
    for name in ("write_to", "read_from"):
        counted(HostArray, name, copies)
    path = Path(folder, "packets")
    for shift in (0, 4, 1020):  # elements: 16 bytes at least
        x, y = memory[shift:][:1024], memory[2048 + shift :][:1024]
        x[:] = np.arange(1024) + 1000 * rank + shift
        want = 2 * (np.arange(1024) + shift) + 1000
        for out, after in ((y, []), (np.empty_like(x), ["read_from"]), (x, ["write_to"])):
            copies.clear()
            assert group.run_program(path, x, out=out) is out
            np.testing.assert_array_equal(out, want)
            assert copies == after
    x = group.register(torch.arange(1024.0) + rank)
    version = x._version
    np.testing.assert_array_equal(group.all_reduce(x, "max", out=x), np.arange(1024) + 1)
    assert x._version > version
    for wrong, says in (
        (memory[1:], "not a multiple of 16"),
        (np.frombuffer(bytes(64), np.float32), "read-only"),
    ):
        with pytest.raises(ark.InvalidUsageError, match=says):
            group.register(wrong)
    group.unregister(memory)
    with pytest.raises(ark.InvalidUsageError, match="is not registered"):
        group.unregister(memory)
    copies.clear()
    group.run_program(path, memory[:1024])
    assert copies == ["write_to", "read_from"]


def counted(kind: type, name: str, calls: list[str]) -> None:
    method = getattr(kind, name)

    def call(*args: object) -> None:
        calls.append(name)
        method(*args)

    setattr(kind, name, call)


def test_registered_memory_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "packets").write_text(plans.reduced_by_packets(RANK_COUNT))
    assert ark.launch(RANK_COUNT, in_place, str(tmp_path)) == 0
