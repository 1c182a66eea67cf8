"""The launchers' environments on the page about several hosts, interpreted as a rank would do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ark.runtime.rank_info import rank_from_environment

PAGE = Path(__file__).parents[2] / "docs" / "multi-node.md"
ROWS = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([A-Z_]+=[^`]+)` \|$", PAGE.read_text(), re.M)


def test_page_has_a_row_for_each_launcher() -> None:
    assert [name for name, _ in ROWS] == [
        "torchrun",
        "Open MPI",
        "MPICH, Intel MPI",
        "Slurm",
        "Ray Train",
    ]


@pytest.mark.parametrize(("name", "line"), ROWS, ids=[name for name, _ in ROWS])
def test_environment_of_a_row_gives_its_rank(name: str, line: str) -> None:
    environment = dict(word.split("=", 1) for word in line.split())
    actual = rank_from_environment(environment)
    assert (actual.rank, actual.world_size, actual.local_rank) == (3, 4, 1)
    assert actual.address == "node0"
    assert actual.port > 0


@pytest.mark.parametrize(("name", "line"), ROWS, ids=[name for name, _ in ROWS])
def test_two_jobs_do_not_meet(name: str, line: str) -> None:
    """Environments with another job number, secret or port belong to different jobs, whose ranks do
    not join each other.
    """
    environment = dict(word.split("=", 1) for word in line.split())
    other = dict(environment)
    variables = ("ARK_JOB_SECRET", "PMIX_NAMESPACE", "SLURM_JOB_ID", "MASTER_PORT")
    key = next(k for k in variables if k in other)
    other[key] = str(int(other[key]) + 1) if other[key].isdigit() else other[key] + "x"
    a, b = rank_from_environment(environment), rank_from_environment(other)
    assert (a.job, a.port) != (b.job, b.port)
