"""Command lines and environments that once caused a traceback: each now gives one paragraph."""

from __future__ import annotations

import builtins
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from ark_cpu import compiler
from ark_cpu.compiler import FLAGS, CpuCompiler, flags

from ark.backend import native
from ark.backend.codegen.dialect import Source
from ark.backend.protocol import Target
from ark.cli import main
from ark.cli.common import read_file, visible, write_file
from ark.cli.export.write import save
from ark.errors import InvalidUsageError, SystemError

ROOT = Path(__file__).parents[3]
NOAH = str(ROOT / "examples" / "noah")
GENERATE = ["generate", NOAH, "--backend", "cpu", "--prompt", "The", "--max-new-tokens", "1"]
BENCH = ["bench", "decode", "--backend", "cpu", "--config", NOAH, "--context", "8"]

TESSEL = ["tessel", "V", "--memory", "4"]
SPREAD = ["parallelize", "llama-3.1-8b", "--mesh", "2x2", "--machine", "h100"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*GENERATE, "--top-k", "2147483648"], "top_k is 2147483648"),
        ([*GENERATE, "--top-k", "-2"], "top_k is -2"),
        ([*GENERATE, "--budget", "inf"], "the budget is inf s"),
        ([*GENERATE, "--budget", "nan"], "the budget is nan s"),
        ([*GENERATE, "--plan", "/dev/zero"], "cannot be read as a plan"),
        (
            [*GENERATE, "--machine", "h100"],
            "machine=h100 is a cuda sm_90a, but the model runs",
        ),
        (
            ["export", NOAH, "--backend", "cuda", "-o", "x"],
            "an architecture with --arch or a machine",
        ),
        (
            ["bench", "comm", "--ranks", "2", "--topology", "absent"],
            "is neither a file nor the name of a topology",
        ),
        (["bench", "comm", "--ranks", "2", "--sizes", "8:4"], "do not form increasing sizes"),
        (["tune", "--collectives", "--ranks", "2", "--sizes", "x"], "'x' is not a size"),
        (["info", "--require", "cpu:²"], "is not a requirement"),
        ([*BENCH, "--set", "processors=0"], "the plan's machine is damaged"),
        ([*BENCH, "--set", "lanes=7"], "is not understood"),
        ([*BENCH, "--set", "in_flight=²"], "is not understood"),
        (["topo", "show", "full3:bandwidth=" + "9" * 200], "expected 1/10^9 to 10^9"),
        (["topo", "synthesize", "full3", "--out", "/nowhere/x"], "cannot be written"),
        ([*TESSEL, "--forward", "9" * 20], "Expected `int` <= 1048576"),
        ([*TESSEL, "--backward", "9" * 20], "Expected `int` <= 1048576"),
        (["tessel", "V", "--memory", "9" * 40], "at most 1099511627776"),
        ([*SPREAD, "--link-gbps", "1e-320"], "it must be 0.001 to 1e9"),
        ([*SPREAD, "--memory", ""], "the value of 'memory' is empty"),
        (["export", NOAH, "--backend", "cpu", "-o", ""], "the value of 'output' is empty"),
        (["export", NOAH, "--backend", "cpu", "-o", "\0"], "a character of code 0"),
    ],
    ids=lambda v: None if isinstance(v, str) else " ".join(v[-2:])[:40],
)
def test_invalid_arguments_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert message in err and "Traceback" not in err


def test_pipe_without_a_writer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A named pipe is refused without waiting for a writer. A pipe that the shell passes is
    read.
    """
    os.mkfifo(tmp_path / "pipe")
    assert main(["tessel", str(tmp_path / "pipe"), "--memory", "4"]) == 2
    assert "it is a pipe" in " ".join(capsys.readouterr().err.split())
    ends = os.pipe()
    os.write(ends[1], b"not JSON")
    os.close(ends[1])
    assert main(["tessel", f"/dev/fd/{ends[0]}", "--memory", "4"]) == 2
    assert "the placement is damaged" in " ".join(capsys.readouterr().err.split())
    os.close(ends[0])


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "full3", "--program"],
        ["synthesize", "full3", "--algorithm", "taccl", "--sketch"],
        ["synthesize", "full3", "--collective", "all_to_all", "--counts"],
    ],
    ids=lambda words: words[-1],
)
def test_endless_topology_files_are_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, errors in ((str(tmp_path / "pipe"), "it is a pipe"), ("/dev/zero", "characters")):
        assert main(["topo", *words, path]) == 2
        assert errors in " ".join(capsys.readouterr().err.split())


def test_failed_output_leaves_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "program.txt"
    path.write_text("precious")
    path.parent.chmod(0o500)
    try:
        if os.access(tmp_path, os.W_OK):  # root may write to every folder
            assert main(["topo", "synthesize", "full3", "--out", str(path / "below")]) == 2
        else:
            assert main(["topo", "synthesize", "full3", "--out", str(path)]) == 2
    finally:
        path.parent.chmod(0o700)
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "environment", "out", "code", "message"),
    [
        (["topo", "show", "full3"], {}, "/dev/full", 2, "No space left"),
        (["cache"], {"ARK_CACHE_DIR": "~nobody-here/x"}, os.devnull, 2, "cannot be resolved"),
        (["topo", "show", "full3"], {"PYTHONIOENCODING": "ascii"}, os.devnull, 0, ""),
    ],
)
def test_unusual_environments_are_handled(
    words: list[str], environment: dict[str, str], out: str, code: int, message: str
) -> None:
    with open(out, "w") as target:
        done = subprocess.run(
            [sys.executable, "-m", "ark", *words],
            env={**os.environ, **environment},
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code, done.stderr
    assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["info"], ["doctor", "--backend", "cpu"]])
def test_closed_pipe_ends_with_code_141(words: list[str]) -> None:
    """If the reader of its output closes the pipe, a command ends with the exit code of SIGPIPE.
    This includes tables printed by rich.
    """
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ark", *words],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_file_that_cannot_grow_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(SystemError, match="cannot be written"):
            write_file(str(tmp_path / "plan.json"), "text")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_missing_folder_is_named_by_the_path_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(SystemError, match=r"x\.json cannot be written: No such file or directory;"):
        write_file(str(tmp_path / "none" / "x.json"), "text")


def test_export_that_fails_leaves_no_files(tmp_path: Path) -> None:
    tmp_path.joinpath("b.c").mkdir()
    with pytest.raises(SystemError, match="cannot be written"):
        save({"a.c": "int a;", "b.c": "int b;"}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["b.c"]
    with pytest.raises(SystemError, match="cannot be written"):
        save({"a.c": "int a;", "no/such/b.c": "int b;"}, tmp_path / "new" / "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["b.c"]


def test_escapes_in_a_models_text_are_shown() -> None:
    assert visible("a\x1b[2Jb\x07\r\n\tä 语\x9b") == "a\\x1b[2Jb\\x07\\r\n\tä 语\\x9b"


def test_endless_files_are_not_read() -> None:
    with pytest.raises(InvalidUsageError, match="characters"):
        read_file("/dev/zero", "a plan")


def test_users_flags_follow_arks_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("x86_64", 1)
    monkeypatch.delenv("ARK_CPU_FLAGS", raising=False)
    plain = CpuCompiler().key(target)
    monkeypatch.setenv("ARK_CPU_FLAGS", "-O1 -DNAME='two words'")
    assert flags() == (*FLAGS, "-O1", "-DNAME=two words")
    assert CpuCompiler().key(target) != plain, "a kernel of other flags would come from the cache"
    monkeypatch.setenv("ARK_CPU_FLAGS", "-DNAME='open")
    with pytest.raises(InvalidUsageError, match="cannot be split"):
        flags()
    monkeypatch.setenv("ARK_CPU_FLAGS", "--no-such-flag")
    with pytest.raises(SystemError, match="no-such-flag"):
        CpuCompiler().compile(Source("int main() {}"), target)


def test_cxx_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    compiler.find_compiler.cache_clear()
    try:
        assert compiler.find_compiler() == (sys.executable, "-m", "ziglang", "c++")
    finally:
        compiler.find_compiler.cache_clear()


def test_device_is_written_to_and_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-o` writes into a FIFO or a device and does not replace it by a file, as `-o /dev/full` once
    did if run as root.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(str(fifo), "text")
        assert fifo.is_fifo() and os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    with pytest.raises(SystemError, match="a pipe without a reader"):
        write_file(str(fifo), "text")
    assert main(["topo", "synthesize", "full3", "--out", "/dev/full"]) == 2
    assert "No space left" in capsys.readouterr().err and Path("/dev/full").is_char_device()


def test_escapes_in_quoted_input_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "\\u001b[2J\\u009b31m"}')
    assert main(["generate", str(tmp_path), "--prompt", "x"]) == 2
    err = capsys.readouterr().err
    assert "\x1b" not in err and "\x9b" not in err and "\\x1b[2J\\x9b31m" in err
    with pytest.raises(builtins.SystemExit, match="2"):
        main(["topo", "show", "full3", "\x1b[31m"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "closed", "code"),
    [
        (["topo", "show", "full3"], ">&-", 0),
        (["topo", "show", "full3"], "<&- >&- 2>&-", 0),
        (["topo", "show", "nosuch"], "2>&-", 2),
        (["topo", "show", "nosuch"], "2>/dev/full", 2),
        ([*GENERATE[:4], "--prompt", "-", "--max-new-tokens", "1"], "<&-", 0),
    ],
)
def test_closed_streams(words: list[str], closed: str, code: int) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "ark", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_compiler_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "TIMEOUT_S", 0.01)
    sleeps = (sys.executable, "-c", "import time; time.sleep(60)")
    with pytest.raises(SystemError, match=r"did not finish within 0\.01 s; try again") as caught:
        native.compiled(sleeps, {"a.cpp": ""}, [], "a kernel")
    assert "ziglang" not in str(caught.value)
    with pytest.raises(SystemError, match="the ziglang compiler, used because no other"):
        native.compiled((*sleeps, "ziglang"), {"a.cpp": ""}, [], "a kernel")


@pytest.mark.parametrize("cxx", ["'", "\\", "nosuch++ -O2", "''"])
def test_cxx_that_is_not_a_command_is_refused(cxx: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", cxx)
    compiler.find_compiler.cache_clear()
    try:
        with pytest.raises(SystemError, match=r"not a valid command|does not exist"):
            compiler.find_compiler()
    finally:
        compiler.find_compiler.cache_clear()
