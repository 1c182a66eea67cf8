"""`ark.distributed.run_program`: plan files on memory that the caller holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ark
from tests.cases import execution_plans as plans

RANK_COUNT = 2


def plans_on_arrays(folder: str) -> None:
    """Each file is run on arrays of two sizes, the second time into the input itself."""
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
