"""Processes that set their rank by ark.set_rank, as ARK's scripts do, started with and without a
launcher.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.slow import slow

SCRIPT = """
import sys
import ark
{set}
t = ark.all_reduce(ark.add(ark.zeros([4]), 1.0), ark.Model.get_rank(), ark.Model.get_world_size())
try:
    with ark.Runtime() as runtime:
        runtime.launch()
        runtime.run()
        print(t.to_numpy().tolist())
except ark.InvalidUsageError as error:
    print("refused:", error)
"""
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MASTER_", "LOCAL_")


def processes(*settings: str, launched: bool = False) -> list[str]:
    """Returns the output of the script for each setting, each in its own process. launched: the
    processes are ranks of one job.
    """
    base = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    started = []
    for rank, text in enumerate(settings):
        place = {"RANK": str(rank), "WORLD_SIZE": str(len(settings)), "ARK_JOB_SECRET": "x" * 32}
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000)}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", SCRIPT.format(set=text)],
                env={**base, **(place | here if launched else {})},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    return [process.communicate(timeout=120)[0].strip() for process in started]


def test_process_that_only_names_its_rank_runs_alone() -> None:
    programs = ("ark.set_rank(0)", "ark.init(); ark.set_rank(1)")
    assert processes(*programs) == [str([1.0] * 4)] * 2
    assert processes("ark.set_rank(3)") == [str([1.0] * 4)]


def test_under_a_launcher_the_number_of_ranks_is_its() -> None:
    assert processes("ark.set_rank(0)", "ark.set_rank(1)", launched=True) == [str([2.0] * 4)] * 2


@pytest.mark.parametrize(
    "order",
    [
        "ark.set_world_size(2)",
        pytest.param("ark.init(); ark.set_world_size(2)", marks=slow),
    ],
)
def test_ranks_without_a_launcher_are_told_to_use_one(order: str) -> None:
    (message,) = processes(order)
    assert message.startswith("refused: the model is for 2 ranks")
    assert "torchrun --nproc-per-node 2" in message and "ark.launch(2" in message


def test_ranks_that_contradict_their_launcher_are_refused() -> None:
    wrong = "ark.set_world_size(2); ark.set_rank({})"
    messages = processes(wrong.format(1), wrong.format(0), launched=True)
    for rank, text in enumerate(messages):
        assert f"for rank {1 - rank} of 2" in text and f"as rank {rank} of 2" in text
