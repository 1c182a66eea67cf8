"""Starting ranks on one machine, and detecting a process's rank under other launchers."""

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
from ark.runtime.rank_info import JOIN_TIMEOUT, RankInfo, first_host, rank_from_environment
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]

# A script that each rank runs. It writes its output in one call, so that the lines of several ranks
# do not mix.
MEET = """
import os
from ark.runtime.bootstrap import Bootstrap
with Bootstrap.from_environment() as group:
    ranks = [part.decode() for part in group.all_gather(str(group.rank).encode())]
os.write(1, ("met " + " ".join(ranks) + chr(10)).encode())
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(launching, "_GRACE_S", 0.5)


def process_ends(pid: int) -> bool:
    """True if the process ends within moments, or is a zombie."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.02)
    return False


def test_ranks_of_a_command_connect_and_only_rank_0_prints(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert launch_command(3, [sys.executable, "-c", MEET]) == 0
    assert capfd.readouterr().out == "met 0 1 2\n"


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (3, 3)])
def test_function_may_end_its_rank_by_exit(
    given: int | None, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(1, sys.exit, given) == code
    assert "Traceback" not in capfd.readouterr().err


def test_first_error_comes_through_with_its_rank(capfd: pytest.CaptureFixture[str]) -> None:
    script = (
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit('some noise\\n\\nark: the weights are gone')\n"
        "time.sleep(60)\n"
    )
    assert launch_command(2, [sys.executable, "-c", script]) == 1
    assert capfd.readouterr().err == "ark: rank 1: the weights are gone\n"


SAYS = """
import os, sys, time
from pathlib import Path
from ark.cli import _complain
words, file, rank = sys.argv[1].split(","), Path(sys.argv[2]), int(os.environ["RANK"])
if words[rank] == "runs":
    time.sleep(60)
if rank == 0:
    file.with_suffix(".part").write_text(str(os.getpid()))
    file.with_suffix(".part").rename(file)
else:  # rank 0 fails first
    while not file.exists():
        time.sleep(0.01)
    stat = Path("/proc", file.read_text(), "stat")
    try:
        while ") Z " not in stat.read_text():
            time.sleep(0.01)
    except OSError:
        pass  # nothing of it is left
    time.sleep(0.2)  # the launcher looks every 20 ms
_complain("ark: " + words[rank])
sys.exit(2)
"""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no such size,no such size,no such size", "ranks 0 to 2: no such size"),
        ("the weights are gone,runs", "rank 0: the weights are gone"),
        ("gone,rank 0 has left", "rank 0: gone"),
        ("a,b,a", "ranks 0 and 2: a"),
    ],
)
def test_equal_messages_of_ranks_are_printed_once(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: str,
    message: str,
) -> None:
    """A message that several ranks print is printed once. Each rank ends with an error of the given
    class.
    """
    monkeypatch.setattr(launching, "_GRACE_S", 1.0 if "runs" in words else 20.0)
    command = [sys.executable, "-c", SAYS, words, str(tmp_path / "first")]
    assert launch_command(words.count(",") + 1, command) == 2
    assert capfd.readouterr().err == f"ark: {message}\n"


def test_lists_of_ranks_are_written_in_words() -> None:
    assert launching._named([0, 1, 3, 4, 5, 9]) == "ranks 0, 1, 3 to 5 and 9"


def test_rank_that_a_signal_ends(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import os; os.kill(os.getpid(), 11) if os.environ['RANK'] == '1' else None"
    assert launch_command(2, [sys.executable, "-c", script]) == 128 + 11
    assert "rank 1: ended by signal 11 (SIGSEGV)" in capfd.readouterr().err


def test_missing_command_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
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
    assert len(pids) == 4 and all(process_ends(pid) for pid in pids)


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
    deadline = time.monotonic() + 120
    while len(texts := [f.read_text() for f in tmp_path.iterdir()]) < 2 or not all(texts):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert all(process_ends(int(text)) for text in texts)


def write_rank_info(folder: str) -> None:
    rank_info = rank_from_environment()
    Path(folder, str(rank_info.rank)).write_text(
        f"{rank_info.world_size} {rank_info.local_rank} {rank_info.job}"
    )


def fail_on_rank_1(word: str) -> None:
    if os.environ["RANK"] == "1":
        raise InvalidUsageError(f"{word} went wrong")
    time.sleep(60)


def test_function_runs_on_every_rank(tmp_path: Path) -> None:
    assert launch(2, write_rank_info, str(tmp_path)) == 0
    first, second = ((tmp_path / name).read_text().split() for name in "01")
    assert first[:2] == ["2", "0"] and second[:2] == ["2", "1"]
    assert first[2] == second[2] and len(first[2]) == 32


def speak(failing: int) -> None:
    rank = os.environ["RANK"]
    print(f"rank {rank} was here")
    if int(rank) == failing:
        raise InvalidUsageError("everything went wrong")


@pytest.mark.parametrize("failing", [-1, 1])
def test_output_of_every_rank_is_shown(capfd: pytest.CaptureFixture[str], failing: int) -> None:
    """The output of every rank is shown, also that of a rank that fails afterwards and thereby ends
    the others.
    """
    assert launch(3, speak, failing) == (2 if failing == 1 else 0)
    shown = set(capfd.readouterr().out.splitlines())
    assert shown >= {f"rank {rank} was here" for rank in range(3) if failing in (-1, rank)}


def print_by_halves(folder: str) -> None:
    print("of rank", end=" ")
    (Path(folder) / os.environ["RANK"]).touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.01)
    print(os.environ["RANK"])


def test_launch_unbuffered_prints_whole_lines(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Lines of several ranks are not mixed, although an unbuffered interpreter writes a text and
    its newline separately.
    """
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    assert launch(2, print_by_halves, str(tmp_path)) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["of rank 0", "of rank 1"]


def test_function_that_fails(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(2, fail_on_rank_1, "everything") == 2
    assert capfd.readouterr().err == "ark: rank 1: everything went wrong\n"


def stumble() -> None:
    raise ValueError("raised by the function itself")


def test_functions_traceback_is_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    """If a launched function raises an exception on both ranks, the traceback is printed once and
    starts at the function.
    """
    assert launch(2, stumble) == 1
    errors = capfd.readouterr().err
    assert errors.startswith("ark: ranks 0 and 1: Traceback") or errors.startswith("ark: rank ")
    assert errors.count("Traceback") == errors.count("  File ") == 1 and ", in stumble" in errors


def test_less_than_one_rank() -> None:
    with pytest.raises(InvalidUsageError, match="at least 1"):
        launch_command(0, ["true"])


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch's launcher")
@slow
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
        ({}, RankInfo()),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "node-a",
                "MASTER_PORT": "29500",
                "TORCHELASTIC_RUN_ID": "run7",
            },
            RankInfo(3, 4, 1, "node-a", 29500, job="run7"),
        ),
        (
            {
                "OMPI_COMM_WORLD_RANK": "1",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "MASTER_PORT": "5000",
            },
            RankInfo(1, 2, 1, "127.0.0.1", 5000),
        ),
        (
            {
                "PMI_RANK": "0",
                "PMI_SIZE": "8",
                "MPI_LOCALRANKID": "0",
                "MASTER_ADDR": "h",
                "MASTER_PORT": "9",
            },
            RankInfo(0, 8, 0, "h", 9),
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
            RankInfo(5, 8, 1, "gpu04", 6000, job="77"),
        ),
        # A Slurm batch script that was not started by srun has these variables too, but is not a
        # rank.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"}, RankInfo()),
    ],
)
def test_launcher_variables_give_rank_and_size(environ: dict[str, str], expected: RankInfo) -> None:
    assert rank_from_environment(environ) == expected


def test_port_follows_from_the_job() -> None:
    environ = {"PMI_RANK": "0", "PMI_SIZE": "2", "MASTER_ADDR": "h", "SLURM_JOB_ID": "5"}
    first = rank_from_environment(environ)
    assert 20000 <= first.port < 30000 and first == rank_from_environment(environ)
    assert rank_from_environment({**environ, "SLURM_JOB_ID": "6"}).port != first.port


GROUP = """
import os, sys
from ark.errors import BaseError
from ark.runtime.bootstrap import Bootstrap
try:
    with Bootstrap.from_environment() as group:
        names = {part.decode() for part in group.all_gather(sys.argv[1].encode())}
    print(*names)
except BaseError as error:
    sys.exit(f"ark: {error}")
"""


def member(name: str, patience: float = 60.0, **environment: str) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "ARK_JOB"))}
    return subprocess.Popen(
        [sys.executable, "-c", GROUP, name],
        env={**clean, JOIN_TIMEOUT: str(patience), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def test_jobs_on_one_host_do_not_meet() -> None:
    """Two jobs on one host that have torchrun's default job id and search for a free port from
    adjacent numbers on do not join each other.
    """
    port = 30000 + os.getpid() % 20000
    jobs = []
    for rank in ("1", "0"):
        for number, name in enumerate("ab"):
            place = {"RANK": rank, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port + number)}
            jobs.append((name, member(name, **place)))
    for name, process in jobs:
        out, err = process.communicate(timeout=60)
        assert out == f"{name}\n", err


def test_another_users_ranks_are_turned_away(tmp_path: Path) -> None:
    """A process of another user that guesses all variables of the launcher cannot join, because it
    does not have the key in the user's cache folder.
    """
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "run7"}
    place["MASTER_PORT"] = str(30000 + (os.getpid() + 11) % 20000)
    mine = member("mine", 3.0, RANK="0", **place)
    other = member("other", 1.0, RANK="1", ARK_CACHE_DIR=str(tmp_path / "other"), **place)
    assert "another program, job or user" in other.communicate(timeout=60)[1]
    assert "rank 1 did not join" in mine.communicate(timeout=60)[1]


def test_without_a_secret_or_a_cache_folder_the_job_is_refused() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    process = member("mine", RANK="0", ARK_CACHE_DIR="/dev/null/x", **place)
    assert "set ARK_JOB_SECRET to the same random word" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_job_without_a_distinct_id_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(InvalidUsageError, match=r"not give its ranks a job number.*ARK_JOB_SECRET"):
        rank_from_environment(environ)
    assert rank_from_environment({**environ, "ARK_JOB_SECRET": "x"}).secret


def test_steps_of_one_allocation_are_jobs_of_their_own() -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    environ |= {"SLURM_JOB_ID": "77"}
    first, second = (rank_from_environment({**environ, "SLURM_STEP_ID": n}) for n in "01")
    assert (first.job, second.job) == ("77.0", "77.1") and first.port != second.port


@pytest.mark.parametrize(
    ("environ", "word"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "ARK_JOB_SECRET"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "9"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "70000"}, "70000"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "9", "MASTER_ADDR": "h"}
            | {"ARK_JOIN_TIMEOUT": "inf"},
            "inf",
        ),
    ],
)
def test_contradictory_launcher_variables_are_refused(environ: dict[str, str], word: str) -> None:
    with pytest.raises(InvalidUsageError, match=word):
        rank_from_environment(environ)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("gpu[04-07,11],x", "gpu04"), ("n[3,9]-ib", "n3-ib")],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
