"""Processes that a script starts itself and gives their ranks, as in ARK's tutorials, without a
launcher that gives them an address to connect to.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from ark.runtime.rank_info import rank_among_siblings
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ("RANK", "WORLD_SIZE", "OMPI_", "PMI_", "PMIX_", "SLURM_", "MASTER_", "LOCAL_")

SCRIPT = """
import multiprocessing, sys
import numpy as np
import ark
from ark.runtime.rank_info import rank_among_siblings


def begin(rank):
    ark.init(backend="cpu")
    ark.set_rank(rank)
    ark.set_world_size(2)


def reduce(rank, data):
    begin(rank)
    mine = ark.tensor([64], ark.fp16)
    total = ark.all_reduce(mine, rank, 2)
    with ark.Runtime() as runtime:
        runtime.launch(device_id=rank)
        mine.from_numpy(data[rank])
        runtime.run()
        assert np.array_equal(total.to_numpy(), data[0] + data[1])


def there_and_back(rank, data):
    begin(rank)
    if rank == 0:
        mine = ark.tensor([64], ark.fp16)
        sent = ark.send(mine, 1, 0)
        ark.send_done(sent)
        result = ark.recv(ark.tensor([64], ark.fp16), 1, 1)
    else:
        result = ark.recv(ark.tensor([64], ark.fp16), 0, 0)
        ark.send_done(ark.send(ark.mul(result, 2.0), 0, 1))
    with ark.Runtime() as runtime:
        runtime.launch()
        if rank == 0:
            mine.from_numpy(data[0])
        runtime.run()
        assert np.array_equal(result.to_numpy(), data[0] * (2 - rank))


def late(rank, data):
    ark.set_rank(rank)
    ark.set_world_size(2)
    ark.init(backend="cpu")
    try:
        ark.all_reduce(ark.tensor([64]), rank, 2)
    except ark.ModelError as error:
        assert "after ark.init, which forgets both" in str(error)
    else:
        raise AssertionError


def key(rank, data):
    # The secret and job id are derived from the parent process, so no other job has the same.
    found = rank_among_siblings(rank, 2)
    assert found.secret and found.job == data[2].hex()


def other(rank, data):
    reduce(rank, data)
    begin(1 - rank)
    ark.all_reduce(ark.tensor([64]), 1 - rank, 2)
    try:
        ark.Runtime().launch()
    except ark.InvalidUsageError as error:
        assert f"has joined its job as rank {rank} of 2" in str(error)
    else:
        raise AssertionError


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    ark.init()
    for part in (reduce, there_and_back, late, key, other):
        data = [np.random.default_rng(i).random(64).astype(np.float16) for i in range(2)]
        data.append(bytes(multiprocessing.current_process().authkey))
        processes = [multiprocessing.Process(target=part, args=(i, data)) for i in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        print(part.__name__, *[process.exitcode for process in processes])
"""


def environment(**more: str) -> dict[str, str]:
    """Returns an environment without a launcher's variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=slow)])
def test_processes_of_one_script_meet(method: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(file), method],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.stdout == "reduce 0 0\nthere_and_back 0 0\nlate 0 0\nkey 0 0\nother 0 0\n", (
        done.stderr
    )
    assert done.stderr == ""


def test_processes_of_several_parents_meet_at_a_port_that_is_named(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "script.py").write_text(SCRIPT)
    call = "import numpy as np, script; script.reduce({}, [np.ones(64, np.float16)] * 2)"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", call.format(rank)],
            env=environment(ARK_IPC_LISTEN_PORT_BASE=str(port)),
            cwd=tmp_path,
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]


@pytest.mark.parametrize(
    ("named", "job"), [({}, None), ({"ARK_IPC_LISTEN_PORT_BASE": "42000"}, "port 42000")]
)
def test_process_of_no_script_needs_a_port(named: Mapping[str, str], job: str | None) -> None:
    actual = rank_among_siblings(1, 2, named)
    assert (actual and actual.job) == job
    assert actual is None or (actual.rank, actual.world_size, actual.port) == (1, 2, 42000)
