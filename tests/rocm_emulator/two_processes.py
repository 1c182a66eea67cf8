"""Runs sync.hip's `put_signal_wait` in two processes that map each other's memory. Used by the
tests of memory that processes share, and by those of the checks across processes.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from ark_rocm_emulator import ErrorKind, emulated, failures
from hip import hip
from hip_runner import Arguments, Buffers, HipError, check, download, launch

BLOCKS, THREADS = 2, 64
LANES = BLOCKS * THREADS
UNCACHED_FLAG = 3  # hipDeviceMallocUncached
TIMEOUT_S = 60  # seconds to wait for a process's message


def _rank(pipe: Connection, arch: str, binary: bytes, rank: int, rounds: int, checks: int) -> None:
    """One process: exchanges memory handles with the other process, runs the kernel, and sends back
    the received row of data or the error.
    """
    settings = {"seed": rank, "checks": checks, "external_wait_ms": 3000, "report": 0}
    with emulated(arch, **settings), Buffers() as buffers:
        mine = buffers.upload(np.arange(LANES, dtype=np.int32) * (rank + 1))
        flags = buffers.upload(np.zeros(BLOCKS, np.uint32), UNCACHED_FLAG)
        own = buffers.empty(2 * LANES * 4, UNCACHED_FLAG), flags
        for pointer in own:
            handle = check(hip.hipIpcGetMemHandle(pointer))
            pipe.send(ctypes.string_at(handle.as_c_void_p().value, 64))
        theirs = []
        for _ in own:
            handle = hip.hipIpcMemHandle_t.fromObj(bytearray(pipe.recv()))
            theirs.append(check(hip.hipIpcOpenMemHandle(handle, 1)))
        module = check(hip.hipModuleLoadData(binary))
        function = check(hip.hipModuleGetFunction(module, b"put_signal_wait"))
        arguments = Arguments(mine, *theirs, *own, np.int32(rank), np.int32(rounds))
        try:
            launch(function, BLOCKS, THREADS, arguments)
            check(hip.hipDeviceSynchronize())
            pipe.send(download(mine, (LANES,), np.int32))
        except HipError:
            pipe.send([failure.kind for failure in failures()])
        pipe.recv()  # the other process may still read this one's memory


def _serve(pipe: Connection, rank: int) -> None:
    """One process: runs an exchange for each (arch, binary, rounds, checks) that it receives."""
    while True:
        arch, binary, rounds, checks = pipe.recv()
        _rank(pipe, arch, binary, rank, rounds, checks)


class _Ranks:
    """Two processes, which take seconds to start and run one exchange after another. They end with
    this process.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(2)]
        self.ends = [pipe[0] for pipe in pipes]
        self.processes = [
            context.Process(target=_serve, args=(pipe[1], rank), daemon=True)
            for rank, pipe in enumerate(pipes)
        ]
        for process, pipe in zip(self.processes, pipes, strict=True):
            process.start()
            pipe[1].close()  # so that reading ends when the process ends

    def answers(self, *case: Any) -> list[Any]:
        """Runs one exchange. Returns, for each process, the row of data that it received or the
        emulator's report.
        """
        for end in self.ends:
            end.send(case)
        for _ in range(2):  # handles of the arriving data, then of the flags
            sent = [self._received(end) for end in self.ends]
            for rank in range(2):
                self.ends[1 - rank].send(sent[rank])
        got = [self._received(end) for end in self.ends]
        for end in self.ends:
            end.send(None)
        return got

    def _received(self, end: Connection) -> Any:
        assert end.poll(TIMEOUT_S), f"a process said nothing for {TIMEOUT_S} s"
        return end.recv()

    def end(self) -> None:
        for process in self.processes:
            process.kill()


@lru_cache(maxsize=1)
def _ranks() -> _Ranks:
    return _Ranks()


def exchange(arch: str, binary: bytes, checks: int = 0, rounds: int = 5) -> list[ErrorKind]:
    """Runs one exchange between two processes. Returns the kinds of the emulator's reports. If
    there is none, asserts that the received data are right.
    """
    try:
        got = _ranks().answers(arch, binary, rounds, checks)
    except BaseException:
        _ranks().end()
        _ranks.cache_clear()
        raise
    reported = [kind for answer in got if isinstance(answer, list) for kind in answer]
    if reported:
        return reported
    values = [np.arange(LANES) * (rank + 1) for rank in range(2)]
    for r in range(1, rounds + 1):
        values = [values[1] + 1 + r, values[0] + 0 + r]
    for rank in range(2):
        np.testing.assert_array_equal(got[rank], values[rank])
    return []
