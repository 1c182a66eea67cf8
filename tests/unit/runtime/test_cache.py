"""The cache stores code that will be executed: write permissions, damaged entries, and entries that
do not match.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ark.backend import registry
from ark.ir.dtype import by_name
from ark.models.build import Shape
from ark.models.plans import plans
from ark.runtime import cache
from ark.runtime.executor import Executor
from tests.slow import slow
from tests.unit.plan.shapes import CONFIG

ROOT = Path(__file__).resolve().parents[3]
NOAH = ROOT / "examples/noah"
NAME, OTHER = cache.key("one"), cache.key("two")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the path of an empty cache for this test."""
    path = tmp_path / "cache"
    monkeypatch.setenv("ARK_CACHE_DIR", str(path))
    cache._without.cache_clear()
    return path


def test_stored_entries_are_read_back(place: Path) -> None:
    assert cache.load(cache.PLANS, NAME) is None
    cache.store(cache.PLANS, NAME, b"content")
    assert cache.load(cache.PLANS, NAME) == b"content"
    assert place.stat().st_mode & 0o777 == 0o700
    assert (place / "key").stat().st_mode & 0o777 == 0o600
    assert cache.entries() == [place / "plans" / NAME]


def sha256_alone(path: Path) -> None:
    data = b"poison"
    path.write_bytes(hashlib.sha256(data).digest() + data)


def one_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def of_another_name(path: Path) -> None:
    cache.store(cache.PLANS, OTHER, b"another plan")
    shutil.copy(path.parent / OTHER, path)


def of_another_kind(path: Path) -> None:
    cache.store(cache.PROGRAMS, NAME, b"a program")
    shutil.copy(path.parents[1] / "programs" / NAME, path)


def with_another_key(path: Path) -> None:
    (path.parents[1] / "key").write_bytes(bytes(32))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


CHANGES = [sha256_alone, one_byte, of_another_name, of_another_kind, with_another_key, cut]


@pytest.mark.parametrize("change", CHANGES)
def test_changed_entry_is_dropped_and_made_again(place: Path, change: Any) -> None:
    cache.store(cache.PLANS, NAME, b"content")
    change(place / "plans" / NAME)
    assert cache.load(cache.PLANS, NAME) is None
    assert not (place / "plans" / NAME).exists()
    cache.store(cache.PLANS, NAME, b"content")
    assert cache.load(cache.PLANS, NAME) == b"content"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_that_others_may_write(
    place: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.store(cache.PLANS, NAME, b"content")
    place.chmod(mode)
    assert cache.load(cache.PLANS, NAME) is None
    cache.store(cache.PLANS, OTHER, b"more")
    assert not (place / "plans" / OTHER).exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "is writable by other users" in line and f"chmod -R go-w {place}" in line
    place.chmod(0o700)
    assert cache.load(cache.PLANS, NAME) == b"content"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache.store(cache.PLANS, NAME, b"content")
    os.chown(place, 12345, -1)
    assert cache.load(cache.PLANS, NAME) is None
    assert "belongs to user 12345" in capsys.readouterr().err
    os.chown(place, 0, -1)
    os.chown(place / "plans" / NAME, 12345, -1)
    assert cache.load(cache.PLANS, NAME) is None


def test_special_files_are_not_read(place: Path, tmp_path: Path) -> None:
    """The cache does not open a named pipe, which would wait, and does not follow a link, which
    could lead to any file.
    """
    cache.store(cache.PLANS, NAME, b"content")
    real = (place / "plans" / NAME).rename(tmp_path / "moved")
    os.mkfifo(place / "plans" / NAME)
    assert cache.load(cache.PLANS, NAME) is None
    (place / "plans" / NAME).unlink()
    (place / "plans" / NAME).symlink_to(real)
    assert cache.load(cache.PLANS, NAME) is None


def test_clearing_keeps_files_of_others(place: Path) -> None:
    cache.store(cache.PLANS, NAME, b"content")
    mine = place / "plans" / "thesis.txt"
    mine.write_text("four years of work")
    assert cache.clear()[0] == 1
    assert mine.read_text() and not (place / "plans" / NAME).exists()
    assert not (place / "key").exists()


def test_leftovers_of_killed_processes_are_removed(place: Path) -> None:
    cache.store(cache.PLANS, NAME, b"content")
    old, new = (place / "plans" / f".partial-{n}" for n in ("old", "new"))
    for path, age in ((old, 7200), (new, -7200)):  # the clock may have been set back since
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    cache.store(cache.PLANS, OTHER, b"more")
    assert not old.exists() and new.exists()
    assert cache.entries() == sorted(place / "plans" / n for n in (NAME, OTHER))
    cache.clear()
    assert not new.exists()


def test_plan_that_cannot_be_read_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = registry.machine("cpu-2")
    shape = Shape(CONFIG, by_name("fp32"), 64, 0)
    result = plans(shape, machine)
    (entry,) = cache.entries()
    cache.store(cache.PLANS, entry.name, b'{"version": "from long ago"}')
    assert plans(shape, machine) == result


@pytest.mark.parametrize("content", [b"", b"no library", b".so\0", b".so\0\x7fELF and no more"])
def test_program_that_cannot_be_loaded_is_made_again(content: bytes) -> None:
    chosen = registry.get("cpu")
    device = chosen.open(0)
    plan = plans(Shape(CONFIG, by_name("fp32"), 64, 0), device.machine)[0]
    executor = Executor(plan, chosen, device)
    name = executor.program.name
    executor.close()
    cache.store(cache.PROGRAMS, name, content)
    executor = Executor(plan, chosen, device)
    assert not executor.program.cached
    executor.close()
    executor = Executor(plan, chosen, device)
    assert executor.program.cached
    executor.close()
    device.close()


def generate(*wrapper: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ark", "generate", str(NOAH), "--prompt", "The king", "--json"]
    return subprocess.run(
        [*wrapper, *argv, "--backend", "cpu", "--max-new-tokens", "4"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
    )


@slow
def test_no_disk_for_the_cache() -> None:
    done = generate(ARK_CACHE_DIR="/dev/null/cache")
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 4
    (line,) = [line for line in done.stderr.splitlines() if "cache" in line]
    assert "continuing without the cache" in line and "Traceback" not in done.stderr


def full_disk(folder: Path, size: str) -> list[str]:
    """Returns a prefix that runs a command with a disk of `size` mounted over a folder."""
    folder.mkdir()
    return mounted(f"mount -t tmpfs -o size={size} none {folder}")


def mounted(mounting: str) -> list[str]:
    """Returns a prefix that runs a command with a mount that only this command sees. Skips the test
    if mounting is not possible.
    """
    words = f'{mounting} && exec "$@"'
    wrapper = ["unshare", "-rm", "sh", "-c", words, "sh"]
    if (
        not shutil.which("unshare")
        or subprocess.run([*wrapper, "true"], capture_output=True).returncode
    ):
        pytest.skip("this system lets nobody mount a small disk of his own")
    return wrapper


def test_full_disk_under_the_cache(tmp_path: Path) -> None:
    """If the disk of the cache is full, the entry is not stored and the generated text is
    the same.
    """
    disk = tmp_path / "disk"
    wrapper = full_disk(disk, "16k")
    wrapper[4] = wrapper[4].replace('exec "$@"', f'"$@"; c=$?; ls -RA {disk} >&2; exit $c')
    done = generate(*wrapper, ARK_CACHE_DIR=str(disk / "cache"))
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 4
    assert done.stderr.count("continuing without the cache: [Errno 28] No space left") == 1
    assert ".partial" not in done.stderr


@slow
def test_cache_that_can_only_be_read(tmp_path: Path) -> None:
    """With a read-only cache, existing entries are used, missing entries are compiled but not
    stored, and `ark cache clear` is refused.
    """
    folder = tmp_path / "cache"
    first = generate(ARK_CACHE_DIR=str(folder))
    there = sorted(folder.rglob("*"))
    wrapper = mounted(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
    second = generate(*wrapper, ARK_CACHE_DIR=str(folder))
    assert (second.returncode, second.stdout) == (0, first.stdout)
    assert "cache" not in second.stderr
    other = generate(*wrapper, ARK_CACHE_DIR=str(folder), ARK_CPU_FLAGS="-DANOTHER")
    assert (other.returncode, other.stdout) == (0, first.stdout)
    assert other.stderr.count("continuing without the cache: [Errno 30] Read-only") == 1
    clear = [*wrapper, sys.executable, "-m", "ark", "cache", "clear"]
    done = subprocess.run(
        clear,
        env={**os.environ, "ARK_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 2 and "cannot be removed" in " ".join(done.stderr.split())
    assert sorted(folder.rglob("*")) == there


@slow
def test_full_disk_under_the_compiler(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    done = generate(*full_disk(disk, "4k"), TMPDIR=str(disk))
    assert done.returncode == 2, done.stderr
    message = " ".join(done.stderr.split())
    assert "TMPDIR" in message and "Traceback" not in message


def test_two_processes_create_one_key(place: Path) -> None:
    text = (
        "import sys\nfrom ark.runtime import cache\n"
        "cache.store('plans', cache.key(sys.argv[1]), b'x')\n"
    )
    started = [subprocess.Popen([sys.executable, "-c", text, str(n)], cwd=ROOT) for n in range(4)]
    assert [p.wait(60) for p in started] == [0] * 4
    assert all(cache.load("plans", cache.key(str(n))) == b"x" for n in range(4))
    assert np.all([p.parent.name == "plans" for p in cache.entries()])


def test_concurrent_requests_create_an_entry_once(place: Path) -> None:
    text = (
        "import time\nfrom ark.runtime import cache\n"
        "with cache.making('programs', 'a' * 64):\n"
        "    if cache.load('programs', 'a' * 64) is None:\n"
        "        time.sleep(0.2)\n"
        "        cache.store('programs', 'a' * 64, b'x')\n"
        "        print('made')\n"
    )
    words = [sys.executable, "-c", text]
    started = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) for _ in range(4)]
    outputs = [p.communicate(timeout=60)[0] for p in started]
    assert sorted(outputs) == [b"", b"", b"", b"made\n"]
    assert [p.name for p in place.glob("programs/*")] == ["a" * 64]
    assert not list(place.glob("programs/.making-*"))


def test_process_that_builds_too_long_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.1)
    order = []
    with cache.making("programs", "b" * 64):
        with cache.making("programs", "b" * 64):  # a second, independent lock
            order.append("second")
        order.append("first")
    assert order == ["second", "first"]
    with cache.making("programs", "b" * 64):
        assert len(list(place.glob("programs/.making-*"))) == 1
        assert cache.clear() == (0, 0)
    assert not list(place.glob("programs/*"))
