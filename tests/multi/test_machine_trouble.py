"""Faults of the machine as a user sees them: stopped, killed and starved processes, wrong clocks.

Full and missing disks are in tests/unit/runtime/test_cache.py, killed ranks in test_generate_ranks.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ark_cpu import memory

from tests.checkpoints import make_endless
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
NOAH = ROOT / "examples/noah"
LONG_CONTEXT = 20_000

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's signals and limits")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_endless(tmp_path_factory.mktemp("endless"), LONG_CONTEXT)


def argv(directory: Path, *extra: str) -> list[str]:
    words = ["generate", str(directory), "--backend", "cpu", "--prompt", "The king", *extra]
    return [sys.executable, "-m", "ark", *words]


def begin(directory: Path, *extra: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv(directory, *extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def tokens(*extra: str, **environment: str) -> list[int]:
    process = begin(NOAH, "--json", "--max-new-tokens", "12", *extra, **environment)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return list(json.loads(out)["tokens"])


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@slow
def test_process_that_was_stopped_goes_on(endless: Path) -> None:
    """The time in which a process was stopped by SIGSTOP does not count towards the kernel's
    timeout.
    """
    long = ("--context", str(LONG_CONTEXT), "--max-new-tokens", "6000", "--budget", "3")
    process = begin(endless, *long)
    assert process.stdout is not None
    text = process.stdout.read(1)
    for _ in range(2):
        process.send_signal(signal.SIGSTOP)
        time.sleep(4)
        process.send_signal(signal.SIGCONT)
        text += process.stdout.read(50)
    text += process.stdout.read()
    assert process.wait(timeout=120) == 0, process.stderr and process.stderr.read()
    assert len(text) > 6000


@slow
def test_rank_that_is_stopped_is_named(endless: Path) -> None:
    long = ("--context", str(LONG_CONTEXT), "--max-new-tokens", str(LONG_CONTEXT), "--budget", "3")
    process = begin(endless, *long, "--ranks", "2")
    assert process.stdout is not None
    process.stdout.read(1)
    victim = children(process.pid)[1]
    os.kill(victim, signal.SIGSTOP)
    _, err = process.communicate(timeout=120)
    message = " ".join(err.split())
    assert process.returncode == 2 and "Traceback" not in err, err
    assert "rank 1" in message and "longer than its budget" in message
    assert (
        not Path(f"/proc/{victim}/cmdline").exists()
        or not Path(f"/proc/{victim}/cmdline").read_bytes()
    )


@slow
def test_killed_process_leaves_nothing_that_disturbs_the_next(tmp_path: Path) -> None:
    own = {"ARK_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    for pause in (0.6, 1.2, 2.4):
        process = begin(NOAH, "--json", **own)
        time.sleep(pause)
        process.kill()
        process.communicate()
    assert tokens(**own) == tokens()


@slow
def test_rank_that_the_system_kills(endless: Path) -> None:
    long = ("--context", str(LONG_CONTEXT), "--max-new-tokens", str(LONG_CONTEXT))
    process = begin(endless, *long, "--ranks", "2")
    assert process.stdout is not None
    process.stdout.read(1)
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0 and "rank 1" in err and "Traceback" not in err


@slow
def test_too_little_address_space(endless: Path) -> None:
    """If the limit of its address space is half of what it needs, or somewhat more, a command ends
    with an error message and without a traceback or signal.
    """
    for limit in (0.45, 0.7, 1.0, 1.4):
        done = subprocess.run(
            argv(endless, "--max-new-tokens", "4"),
            capture_output=True,
            text=True,
            timeout=120,
            cwd=ROOT,
            preexec_fn=lambda limit=limit: resource.setrlimit(  # type: ignore[misc]
                resource.RLIMIT_AS, (int(limit * 2**30),) * 2
            ),
        )
        assert done.returncode in (0, 2), (limit, done.stderr)
        assert "Traceback" not in done.stderr, (limit, done.stderr)
        if done.returncode:
            assert "ark: " in done.stderr


@slow
def test_small_stack() -> None:
    """A command runs with a small stack limit, because threads that run processors set their own
    stack size. (With a much smaller limit gcc fails.)
    """
    done = subprocess.run(
        argv(NOAH, "--max-new-tokens", "2"),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, 256 << 10)),
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.fixture
def group() -> Iterator[Path]:
    """Returns a control group for this test whose memory is limited to 200 MB."""
    base = Path("/sys/fs/cgroup/memory")
    limit, root = ("memory.limit_in_bytes", base) if base.is_dir() else ("memory.max", base.parent)
    own = root / f"ark-test-{os.getpid()}"
    try:
        own.mkdir()
        (own / limit).write_text(str(200_000_000))
    except OSError as error:
        shutil.rmtree(own, ignore_errors=True)
        pytest.skip(f"control groups cannot be made here: {error}")
    yield own
    own.rmdir()


@slow
def test_memory_limit_is_seen_before_it_kills(group: Path, tmp_path: Path) -> None:
    """A model that fits into the machine's memory but not into the container's limit is refused
    before the process is killed.
    """
    directory = make_endless(tmp_path / "model", 4_000_000)
    text = (
        "import os, sys\n"
        f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
        f"os.execv(sys.executable, {argv(directory, '--context', '4000000')!r})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=200, cwd=ROOT
    )
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    assert "memory" in message and "has free only" in message and "Traceback" not in message


def test_free_memory_of_a_control_group_is_computed(tmp_path: Path) -> None:
    """Free memory is computed from control groups of version 1 and 2, nested limits and no limit.
    The page cache counts as free.
    """
    v1, v2 = tmp_path / "memory/a", tmp_path / "b/c"
    for folder, names, values in (
        (v1, ("limit_in_bytes", "usage_in_bytes"), (1000, 400)),
        (v2, ("max", "current"), ("max", 5)),
        (v2.parent, ("max", "current"), (900, 700)),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in zip(names, values, strict=True):
            (folder / f"memory.{name}").write_text(f"{value}\n")
    (v1 / "memory.stat").write_text("cache 100\nrss 3\n")
    (v2.parent / "memory.stat").write_text("anon 1\nfile 50\n")
    of = tmp_path / "of"
    of.write_text("4:memory:/a\n1:cpu:/zzz\n0::/b/c\n")
    actual = [memory._left(g) for g in memory.groups(tmp_path, of)]
    assert [n for n in actual if n < 1 << 62] == [700, 250]


CLOCK = r"""
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
static long jump(void) {
  static long calls = 0;
  return (__sync_add_and_fetch(&calls, 1) % 3 - 1) * 40000000L;
}
int clock_gettime(clockid_t clock, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  const int code = real(clock, at);
  if (clock == CLOCK_REALTIME) at->tv_sec += jump();
  return code;
}
int gettimeofday(struct timeval *at, void *zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return 0;
}
time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}
"""


@slow
def test_clock_that_jumps(tmp_path: Path) -> None:
    """The wall clock jumps by more than a year at every reading. No timeout depends on it."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(CLOCK)
    flags = ["-D_GNU_SOURCE", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    jumping = {"LD_PRELOAD": str(library), "ARK_CACHE_DIR": str(tmp_path / "cache")}
    assert tokens(**jumping) == tokens()
    assert tokens("--ranks", "2", **jumping) == tokens()
