"""Starts the ranks of a job on this machine: `ark.launch(n, function)` and `--ranks n`.

Other launchers (torchrun, mpirun, srun) work as well; this one needs no installation. It sets the
variables that ark.runtime.rank_info reads, and shows the ranks' output: only rank 0's if it runs a
command, and whole lines of all ranks if it runs a function. It reports which rank failed first and
why (once, if several ranks have the same reason). When it ends, for whatever reason, it ends all
processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ark.backend import threads
from ark.errors import BaseError, InvalidUsageError, SystemError
from ark.ir.values import whole
from ark.runtime.watchdog import LAST_WORDS, tie_to

_WATCHDOG = Path(__file__).with_name("watchdog.py")
_GRACE_S = 2.0  # how long ranks may continue after the first has failed
_MAX_TAIL_BYTES = 16384


class _Rank(Protocol):
    """A process that was started as a rank of the job."""

    pid: int

    def poll(self) -> int | None: ...

    def complaint(self) -> str:
        """The last paragraph that the rank wrote as an error; empty if the rank has printed it
        itself.
        """
        ...


def launch(ranks: int, function: Callable[..., object], *args: object) -> int:
    """Runs function(*args) in `ranks` new processes, each with its rank in the environment.

    The function must be defined at the top level of a module (not a lambda), as multiprocessing
    requires. The output of every rank is printed in whole lines. Returns 0 if all ranks succeed.
    Otherwise prints the error of the rank that failed first and returns its exit code: 2 for an
    error of ark, that of sys.exit, otherwise 1.

    Examples:
        >>> ark.launch(1, print, "a rank")
        0
    """
    _check(ranks)
    import multiprocessing  # not at the top, because few users need it
    from multiprocessing import reduction

    try:
        reduction.ForkingPickler.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InvalidUsageError(
            f"launch: {function!r:.80} cannot be pickled: {error}; pass a function defined at "
            "the top level of a module (not a lambda or a nested function)"
        ) from error
    context = multiprocessing.get_context("spawn")
    started: list[_Rank] = []
    try:
        for environment in _environments(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_call, args=(environment, os.getpid(), theirs, function, args), daemon=True
            )
            process.start()
            theirs.close()
            started.append(_FunctionRank(process, ours))
        return _supervise(started)
    finally:
        _end(started)


def launch_command(
    ranks: int,
    argv: Sequence[str],
    *,
    stdin: bool = False,
    forward: Sequence[signal.Signals] = (),
) -> int:
    """Runs the command in `ranks` processes and returns the exit code, as `launch` does.

    stdin: True if rank 0 may read this process's standard input; other ranks never can. forward:
    signals that are passed on to rank 0 and do not end this process.
    """
    _check(ranks)
    started: list[_Rank] = []

    def send(number: int, _: object) -> None:
        if started and started[0].poll() is None:
            os.kill(started[0].pid, number)

    before = {number: signal.signal(number, send) for number in forward}
    try:
        for rank, environment in enumerate(_environments(ranks)):
            ours, theirs = (
                os.pipe()
            )  # for errors; rank 0 writes its own to the terminal, except for the last paragraph
            try:
                process = subprocess.Popen(
                    [sys.executable, "-S", "-E", str(_WATCHDOG), str(os.getpid()), *argv],
                    env={**os.environ, **environment}
                    | ({LAST_WORDS: str(theirs)} if rank == 0 else {}),
                    stdin=None if stdin and rank == 0 else subprocess.DEVNULL,
                    stdout=None if rank == 0 else subprocess.DEVNULL,
                    stderr=None if rank == 0 else theirs,
                    pass_fds=[theirs] if rank == 0 else [],
                    start_new_session=True,
                )
            except BaseException:
                os.close(ours)
                raise
            finally:
                os.close(theirs)
            started.append(_CommandRank(process, ours))
        return _supervise(started)
    except BlockingIOError as error:
        raise SystemError(
            f"the system refused to start {ranks} processes; raise the limit on them (`ulimit -u`)"
        ) from error
    except (OSError, ValueError) as error:  # a NUL character in an argument, or too many arguments
        raise InvalidUsageError(
            f"the ranks cannot be started with these arguments: {error}; pass a long prompt "
            "through standard input (--prompt -)"
        ) from error
    finally:
        _end(started)
        for number, handler in before.items():
            signal.signal(number, handler)


def _check(ranks: int) -> None:
    if whole("launch", ranks) < 1:
        raise InvalidUsageError(f"cannot start {ranks} ranks; give at least 1")


def _environments(ranks: int) -> list[dict[str, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ARK_JOB_SECRET": secrets.token_hex(16),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _call(
    environment: Mapping[str, str],
    parent: int,
    report: Any,
    function: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    """The main function of a rank's process: calls `function`, and reports an exception to the
    launcher.
    """
    os.setsid()
    tie_to(parent)
    os.environ.update(environment)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Writes each line with one call. Otherwise print, with PYTHONUNBUFFERED set, writes the
        # text and the line's end separately, and another rank's text could come between them.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    try:
        function(*args)
    except SystemExit:
        raise  # multiprocessing ends the process with its code
    except BaseException as error:
        known = isinstance(error, BaseError)
        frames = error.__traceback__
        # The output stream may be closed, or the process that reads it may have ended.
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        own = error.with_traceback(frames and frames.tb_next)  # omits this function's frame
        report.send(str(error) if known else "".join(traceback.format_exception(own)).strip())
        os._exit(2 if known else 1)


class _FunctionRank:
    def __init__(self, process: Any, report: Any) -> None:
        self.pid = process.pid
        self._process = process
        self._report = report

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def complaint(self) -> str:
        with contextlib.suppress(EOFError, OSError):
            if self._report.poll():
                return str(self._report.recv())
        return ""


class _CommandRank:
    def __init__(self, process: subprocess.Popen[bytes], errors: int) -> None:
        self.pid = process.pid
        self._process = process
        self._errors = errors
        self._tail = b""
        self._reader: threading.Thread = threads.start(self._read)

    def _read(self) -> None:
        with open(self._errors, "rb", buffering=0) as errors:
            while piece := errors.read(4096):
                self._tail = (self._tail + piece)[-_MAX_TAIL_BYTES:]

    def poll(self) -> int | None:
        return self._process.poll()

    def complaint(self) -> str:
        self._reader.join(1.0)
        text = self._tail.decode(errors="replace").strip().rsplit("\n\n", 1)[-1]
        # The error message of ark's command line has line breaks already. They are removed here,
        # because the launcher wraps the message again.
        return " ".join(text.removeprefix("ark: ").split()) if text.startswith("ark: ") else text


def _supervise(ranks: Sequence[_Rank]) -> int:
    """Waits until all ranks have ended. If one fails, it waits a limited time for the others to
    end. Returns the exit code.
    """
    failed = -1
    deadline = 0.0
    while True:
        codes = [rank.poll() for rank in ranks]
        if failed < 0:
            failed = next((i for i, code in enumerate(codes) if code), -1)
            deadline = time.monotonic() + _GRACE_S
        if all(code is not None for code in codes) or (failed >= 0 and time.monotonic() > deadline):
            break
        time.sleep(0.02)
    if failed < 0:
        return 0
    code = codes[failed]
    assert code is not None
    complaint = ranks[failed].complaint()
    if code < 0:
        complaint = (
            f"ended by signal {-code} ({signal.Signals(-code).name}"
            + (", which the system sends where memory runs out" if code == -signal.SIGKILL else "")
            + "); the other ranks were stopped"
            + (f". Its last output: {complaint}" if complaint else "")
        )
    if complaint:
        same = [
            i
            for i, code in enumerate(codes)
            if i == failed or (code and code > 0 and ranks[i].complaint() == complaint)
        ]
        text = f"ark: {_named(same)}: {complaint}"
        print(text if "\n" in text else textwrap.fill(text, 100), file=sys.stderr, flush=True)
    return code if code > 0 else 128 - code


def _named(ranks: Sequence[int]) -> str:
    """Ranks as text. Three or more consecutive ranks are written as a range: `ranks 0 to 3 and
    6`.
    """
    rows: list[list[int]] = []
    for rank in ranks:
        if rows and rows[-1][-1] == rank - 1:
            rows[-1].append(rank)
        else:
            rows.append([rank])
    words: list[str] = []
    for row in rows:
        words += map(str, row) if len(row) < 3 else [f"{row[0]} to {row[-1]}"]
    last = words.pop()
    text = f"{', '.join(words)} and {last}" if words else last
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _end(ranks: Sequence[_Rank]) -> None:
    """Ends all process groups that still run, by SIGTERM first."""
    for stop in (signal.SIGTERM, signal.SIGKILL):
        for rank in ranks:
            alive = rank.poll() is None
            # Each rank leads a process group with the processes that it has started, so signals are
            # sent to the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if alive or stop == signal.SIGKILL:
                    os.killpg(rank.pid, stop)
                    continue
            if alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, stop)
        deadline = time.monotonic() + _GRACE_S
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)
