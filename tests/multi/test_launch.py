"""Starting ranks on one machine, and finding one's place under other launchers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ark.errors import InvalidUsageError
from ark.runtime import launch as launching
from ark.runtime.launch import launch, launch_command
from ark.runtime.place import Place, first_host, place_from_environment

ROOT = Path(__file__).resolve().parents[2]

# One write a rank: lines of several ranks must not run into each other.
MEET = """
import os
from ark.runtime.bootstrap import Bootstrap
with Bootstrap.from_environment(15.0) as group:
    ranks = [part.decode() for part in group.all_gather(str(group.rank).encode())]
os.write(1, ("met " + " ".join(ranks) + chr(10)).encode())
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(launching, "_GRACE_S", 0.5)


def gone(pid: int) -> bool:
    """True if the process ends (or is only waiting to be reaped) within moments."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_a_command_meets_and_rank_0_speaks(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_command(3, [sys.executable, "-c", MEET]) == 0
    assert capfd.readouterr().out == "met 0 1 2\n"


def test_the_first_error_comes_through_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('some noise\\n\\nark: the weights are gone')\n"
        "time.sleep(60)\n"
    )
    assert launch_command(2, [sys.executable, "-c", script]) == 1
    assert capfd.readouterr().err == "ark: rank 1: the weights are gone\n"


def test_a_rank_that_a_signal_ends(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os; os.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else None"
    assert launch_command(2, [sys.executable, "-c", script]) == 128 + 11
    assert "rank 1: ended by signal 11 (SIGSEGV)" in capfd.readouterr().err


def test_a_command_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_command(2, ["no-such-program-here"]) == 2
    assert "cannot start 'no-such-program-here'" in capfd.readouterr().err


def test_nothing_is_left_running_after_a_failure(tmp_path: Path) -> None:
    script = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "rank = os.environ['RANK']\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        f"path = os.path.join({str(tmp_path)!r}, rank)\n"
        "open(path, 'w').write(f'{os.getpid()} {child.pid}')\n"
        "while len(os.listdir(os.path.dirname(path))) < 2: time.sleep(0.01)\n"
        "time.sleep(0.1)\n"
        "sys.exit(3) if rank == '0' else time.sleep(300)\n"
    )
    assert launch_command(2, [sys.executable, "-c", script]) == 3
    pids = [int(word) for f in tmp_path.iterdir() for word in f.read_text().split()]
    assert len(pids) == 4 and all(gone(pid) for pid in pids)


def test_ranks_end_with_a_killed_launcher(tmp_path: Path) -> None:
    inner = (
        "import os, time; "
        f"open(os.path.join({str(tmp_path)!r}, os.environ['RANK']), 'w').write(str(os.getpid())); "
        "time.sleep(300)"
    )
    outer = (
        "import sys; from ark.runtime.launch import launch_command; "
        f"launch_command(2, [sys.executable, '-c', {inner!r}])"
    )
    launcher = subprocess.Popen([sys.executable, "-c", outer], cwd=ROOT)
    deadline = time.monotonic() + 20
    while len(texts := [f.read_text() for f in tmp_path.iterdir()]) < 2 or not all(texts):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert all(gone(int(text)) for text in texts)


def write_place(folder: str) -> None:
    place = place_from_environment()
    Path(folder, str(place.rank)).write_text(f"{place.world_size} {place.local_rank} {place.job}")


def fail_on_rank_1(word: str) -> None:
    if os.environ["RANK"] == "1":
        raise InvalidUsageError(f"{word} went wrong")
    time.sleep(60)


def test_a_function_runs_on_every_rank(tmp_path: Path) -> None:
    assert launch(2, write_place, str(tmp_path)) == 0
    first, second = ((tmp_path / name).read_text().split() for name in "01")
    assert first[:2] == ["2", "0"] and second[:2] == ["2", "1"]
    assert first[2] == second[2] and len(first[2]) == 32


def test_a_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, fail_on_rank_1, "everything") == 2
    assert capfd.readouterr().err == "ark: rank 1: everything went wrong\n"


def test_less_than_one_rank() -> None:
    with pytest.raises(InvalidUsageError, match="at least 1"):
        launch_command(0, ["true"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch's launcher")
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(MEET)
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    done = subprocess.run(
        [sys.executable, *command, str(29400 + os.getpid() % 2000), str(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert done.stdout == "met 0 1\n" * 2, done.stderr


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Place()),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "node-a",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "run7",
            },
            Place(3, 4, 1, "node-a", 29500, job="run7"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": "5000",
            },
            Place(1, 2, 1, "127.0.0.1", 5000),
        ),
        (
            {
                "PMI_RANK": "0",
                "PMI_SIZE": "8",
                "MPI_LOCALRANKID": "0",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "9",
            },
            Place(0, 8, 0, "h", 9),
        ),
        (
            {
                "SLURM_PROCID": "5",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_NODELIST": "gpu[04-05]",
                "SLURM_JOB_ID": "77",
                "MASTER_PORT": "6000",
            },
            Place(5, 8, 1, "gpu04", 6000, job="77"),
        ),
        # A batch script outside a step is no rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, Place()),
    ],
)
def test_places(environ: dict[str, str], expected: Place) -> None:
    assert place_from_environment(environ) == expected


def test_a_port_follows_from_the_job() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "h", "SLURM_JOB_ID": "5"}
    first = place_from_environment(environ)
    assert 20000 <= first.port < 30000 and first == place_from_environment(environ)
    assert place_from_environment({**environ, "SLURM_JOB_ID": "6"}).port != first.port


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "70000"),
    ],
)
def test_places_that_make_no_sense(environ: dict[str, str], word: str) -> None:
    with pytest.raises(InvalidUsageError, match=word):
        place_from_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[04-07,11],x", "gpu04"), ("n[3,9]-ib", "n3-ib")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
