"""Runs the calls that ranks make in the same order, and detects ranks that make different calls.

A communicator has all ranks of a group, or a sender and a receiver. Before a call, a rank writes a
fingerprint of its calls to shared memory that the others read (ark.distributed.board). At the first
call of a kind and size, the ranks also synchronise over the bootstrap (sockets). If a rank sees a
different call, or waits longer than the group's time limit, the ranks exchange statements of their
calls. Ranks that are in a call then raise the same error, and all other ranks raise it at their
next call. Afterwards the communicator starts anew (a new generation), so the next matching call
works. Called by ark.distributed.group; an executor uses a communicator as the `Ranks` of its plan.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ark.distributed.board import Board, chained, word_of
from ark.distributed.statements import Elsewhere, StatedCall, Statement, error, fails
from ark.errors import BaseError, SystemError
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.hosts import here

PREPARE_S = 600.0  # the limit for a rank that is in the call and plans, compiles or loads it
ANSWER_S = 2.0  # the limit for a rank's statement of its calls, which its bootstrap's thread sends
MAX_STATED_CALLS = 32  # calls in one statement
LOOK_S = 0.02
DIFFERENT_CALLS = "the ranks do not make the same calls"
Kind = Literal["part", "all", "statement"]


class Frame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a communicator. generation: how often the communicator has started anew after an
    error. number: the number of this synchronisation in the generation. purpose: its label, with a
    fingerprint of the sender's calls; ranks synchronise only if their purposes are equal.
    """

    communicator: str
    ranks: list[int]
    generation: int
    number: int
    purpose: str
    kind: Kind
    data: bytes


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's message when the ranks synchronise before a call. number: the call's number on the
    board. kept: names of the loaded calls, least recently used first. more: data of the caller.
    """

    number: int
    host: str
    board: str
    kept: list[str]
    more: bytes


class Talk:
    """The communicators of one group. name: unique among groups that use the job at a time."""

    def __init__(self, job: Bootstrap, name: str, budget_s: float) -> None:
        self.job, self.budget_s = job, budget_s
        self.inside: dict[str, Communicator] = {}  # by name: communicators with a call in progress
        self._communicators: dict[str, Communicator] = {}
        self._lock = threading.Lock()
        self.label = f"calls of {name} {job.count(name)}"
        job.hear(self.label, self._hear)

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """The communicator of that name, of these ranks of the job."""
        with self._lock:
            if name not in self._communicators:
                self._communicators[name] = Communicator(self, name, ranks)
            return self._communicators[name]

    def communicators(self) -> list[Communicator]:
        """Communicators that this rank or a peer has used."""
        with self._lock:
            return list(self._communicators.values())

    def post(self, rank: int, frame: Frame) -> None:
        self.job.post(rank, self.label, msgspec.msgpack.encode(frame))

    def _hear(self, rank: int, body: bytes) -> None:
        with contextlib.suppress(
            msgspec.DecodeError, BaseError
        ):  # the job's failure is reported below
            frame = msgspec.msgpack.decode(body, type=Frame, strict=True)
            if rank in frame.ranks and self.job.rank in frame.ranks:
                self.communicator(frame.communicator, frame.ranks).hear(rank, frame)


class _StuckCallError(SystemError):
    """Raised in a call that cannot continue; the ranks then state their calls."""


class Communicator:
    """Ranks that make the same calls in the same order. rank, world_size: within these ranks.
    fresh: True if the ranks have not synchronised since they began or last started anew.
    """

    def __init__(self, talk: Talk, name: str, ranks: Sequence[int]) -> None:
        self._turn = threading.Lock()  # held by the thread that makes a call
        self.rank, self.world_size = ranks.index(talk.job.rank), len(ranks)
        self._talk, self._job, self._name, self._ranks = talk, talk.job, name, list(ranks)
        self._others = [rank for rank in ranks if rank != talk.job.rank]
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._board = Board()
        self._generation = self._meetings = 0
        self._mapped = False  # the other ranks' boards are mapped
        self._arrived = False  # the other ranks are in the call in progress
        self.fresh = True
        self._calls: deque[tuple[int, int, str]] = deque(maxlen=MAX_STATED_CALLS)  # see StatedCall
        self._number = self._call_count = self._chain = 0  # counts and fingerprint of calls
        self._word = 0  # this rank's word on the board, 0 before it has written one
        self._inside, self._before = "", ""
        self._inside_of, self._budget_s = talk.inside, talk.budget_s
        self._deadline = 0.0
        self._parts: defaultdict[tuple[int, int], dict[int, Frame]] = defaultdict(dict)
        self._results: dict[tuple[int, int], list[bytes]] = {}
        self._statements: defaultdict[int, dict[int, Statement]] = defaultdict(dict)

    # Calls.

    def make(self, text: str, fingerprint: int, waits: bool, run: Callable[[], object]) -> None:
        """Makes a call by calling `run`. text: the call in errors. fingerprint: equal for equal
        calls. waits: return only after all ranks of this host have made the call.

        Raises the communicator's error if the ranks do not make the same call in time.
        """
        with self._turn:
            self._enter(text, fingerprint)
            try:
                run()
                if not self._board.complete(self._number, self._word):
                    self._await(waits)
            except BaseException as raised:
                failed = self._failed(raised)
                if failed is raised:
                    raise
                raise failed from raised
            finally:
                self._inside, self._arrived = "", False
                del self._inside_of[self._name]

    def _enter(self, text: str, fingerprint: int) -> None:
        if self._statements:
            failed = self._settle(ANSWER_S)
            if failed is not None:
                raise failed
        with self._lock:
            self._call_count += 1
            self._number += 1
            self._chain = chained(self._chain, fingerprint)
            self._calls.append((self._call_count, self._chain, text))
            self._inside, self._inside_of[self._name] = text, self
            self._deadline = time.monotonic() + self._budget_s
            if not self.fresh:
                self._word = word_of(self._number, self._chain)
                self._board.post(self._number, self._word)

    def _await(self, waits: bool) -> None:
        """Waits until all ranks of this host have made the call. If `waits` is False, only checks
        once that no rank has made a different call.
        """
        pause = 0.0
        while waits and not self._board.complete(self._number, self._word):
            self._look()
            time.sleep(pause)
            pause = min(pause + 1e-5, 1e-3)
        if self._board.differs(self._number, self._word):
            self._state()
            raise _StuckCallError("another call was made")

    def arrive(self, kept: Sequence[str] = (), more: bytes = b"") -> list[Arrival]:
        """Synchronises ranks before the first call of a kind and size; returns their messages."""
        own = Arrival(self._number, here(), self._board.handle, list(kept), more)
        left = max(0.0, self._deadline - time.monotonic())
        encoded = self._gather("arrival", msgspec.msgpack.encode(own), left)
        arrivals = [msgspec.msgpack.decode(each, type=Arrival, strict=True) for each in encoded]
        self._arrived = True
        if self.fresh:
            if not self._mapped:
                for rank, each in zip(self._ranks, arrivals, strict=True):
                    if rank != self._job.rank and each.host == own.host:
                        self._board.map(each.board)
                self._mapped = True
            with self._changed:
                self._number = max(each.number for each in arrivals)
                self._word = word_of(self._number, self._chain)
                self._board.post(self._number, self._word)
            self.barrier()  # after the barrier every rank reads the others' words
            self.fresh = False
        return arrivals

    def _failed(self, raised: BaseException) -> BaseException:
        """The error to raise for a failed call. If the ranks' calls do not match, it is the error
        that all ranks derive from their statements, otherwise `raised`.
        """
        me, called = f"rank {self._job.rank}", f"{self._inside}, which did not end"
        if (failure := self._job.failure()) is not None:  # a peer that has left answers nothing
            unnamed = str(raised) in (DIFFERENT_CALLS, failure)
            return SystemError(f"{me} called {called}: {failure}") if unnamed else raised
        stuck = bool(self._statements.get(self._generation))
        self._state("" if stuck else f"{me} reports: {str(raised) or type(raised).__name__}")
        waits = isinstance(raised, Exception)  # after Ctrl-C the rank does not wait for statements
        failed = self._settle(ANSWER_S if waits else 0.0)
        if stuck and (failure := self._job.failure()) is not None:
            failed = SystemError(f"{me} called {called}: {failure}")
        return failed if stuck and waits and failed else raised

    def _settle(self, answer_s: float) -> BaseError | None:
        """Starts a new generation once all have stated their calls; returns this rank's error."""
        end = time.monotonic() + answer_s
        with self._changed:
            stated = self._statements[self._generation]
            while len(stated) < self.world_size and self._job.failure() is None:
                if time.monotonic() > end:
                    break
                self._changed.wait(LOOK_S)
            self._state()
            failed = None
            if fails(stated, self._job.rank):
                failed = error(stated, self._ranks, self._budget_s)
            for past in [n for n in self._statements if n <= self._generation]:
                del self._statements[past]
            self._generation += 1
            tables: list[dict[tuple[int, int], Any]] = [self._parts, self._results]
            for table in tables:
                for key in [k for k in table if k[0] < self._generation]:
                    del table[key]
            if self._calls:
                self._before = self._calls[-1][2]
            self._calls.clear()
            self._meetings = self._call_count = self._chain = self._word = 0
            self._inside, self.fresh = "", True
        return failed

    def _state(self, reason: str = "") -> None:
        """Sends the other ranks this rank's statement of its calls, once per generation."""
        with self._changed:
            stated = self._statements[self._generation]
            if self._job.rank in stated:
                return
            communicators = [each for each in list(self._inside_of.values()) if each is not self]
            away = [Elsewhere(each._inside, each._ranks) for each in communicators]
            calls = [StatedCall(*call) for call in self._calls]
            own = Statement(calls, bool(self._inside), away, self._before, reason)
            stated[self._job.rank] = own
        for rank in self._others:
            with contextlib.suppress(SystemError):
                self._post(rank, "statement", 0, "", msgspec.msgpack.encode(own))

    def _look(self) -> None:
        """Raises an error if the call cannot continue. Called repeatedly while the call waits."""
        failed = self.failure()
        if failed is not None:
            raise (SystemError if self._job.failure() is not None else _StuckCallError)(failed)

    # The methods below are the interface that executors use (Ranks).

    def failure(self) -> str | None:
        """The reason why the call in progress cannot continue, or None."""
        failed = self._job.failure()
        if failed is not None:
            return failed
        if self._ended():
            return DIFFERENT_CALLS
        if not self._word or not self._inside:
            return None
        if self._board.differs(self._number, self._word) or (
            time.monotonic() > self._deadline and not self._board.complete(self._number, self._word)
        ):
            self._state()
            return DIFFERENT_CALLS
        return None

    def _ended(self) -> bool:
        """True if the ranks' statements show that the call in progress cannot end normally. If
        every rank that sent a statement has already returned from this call, the call can still
        complete, and the next call raises the error.
        """
        stated = self._statements.get(self._generation, {})
        others = [statement for rank, statement in list(stated.items()) if rank != self._job.rank]
        passed = (
            self._inside
            and others
            and all(statement.is_past(self._call_count, self._chain) for statement in others)
        )
        return bool(stated) and not passed

    def abort(self, message: str) -> None:
        """Reports that a wait on this rank's device has timed out, or the device has failed."""
        complete = not self._word or self._board.complete(self._number, self._word)
        self._state(message if complete else "")

    def barrier(self, label: str = "barrier") -> None:
        """Returns when every rank of the communicator has called it."""
        self._gather(label, b"", self._meeting_s)

    def check_same(self, label: str, digest: str) -> None:
        """Raises SystemError unless all ranks of the communicator pass the same digest."""
        if len(set(self.all_gather(digest.encode()))) > 1:
            raise SystemError(f"the ranks {self._ranks} disagree on {label}")

    def all_gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in the order of the communicator's ranks."""
        return self._gather("all_gather", data, self._meeting_s)

    @property
    def _meeting_s(self) -> float:
        """Seconds to wait for the other ranks. The limit is longer once all ranks are in the call,
        because some of them may still compile.
        """
        return PREPARE_S if self._arrived else self._budget_s

    def _gather(self, label: str, data: bytes, timeout_s: float) -> list[bytes]:
        at = (self._generation, self._meetings)
        self._meetings += 1
        purpose = f"{label} {self._chain:x}"
        first = self._ranks[0]
        if first != self._job.rank:
            self._post(first, "part", at[1], purpose, data)
            self._wait(lambda: at in self._results, timeout_s)
            return self._results.pop(at)
        parts = self._parts[at]
        self._wait(
            lambda: len(parts) == len(self._others) or self._strays(parts, purpose), timeout_s
        )
        if self._strays(parts, purpose):
            self._state()
            raise _StuckCallError("another call was made")
        del self._parts[at]
        result = [parts[rank].data if rank in parts else data for rank in self._ranks]
        for rank in self._others:
            self._post(rank, "all", at[1], purpose, msgspec.msgpack.encode(result))
        return result

    @staticmethod
    def _strays(parts: Mapping[int, Frame], purpose: str) -> bool:
        """True if a rank synchronises for another purpose, because it makes another call."""
        return any(frame.purpose != purpose for frame in list(parts.values()))

    def _wait(self, ready: Callable[[], bool], timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with self._changed:
            while not ready():
                self._look_while_meeting(end)
                self._changed.wait(LOOK_S)

    def _look_while_meeting(self, end: float) -> None:
        failed = self._job.failure()
        if failed is not None:
            raise SystemError(failed)
        differs = self._word and self._inside and self._board.differs(self._number, self._word)
        if differs or time.monotonic() > end:
            self._state()
            raise _StuckCallError(DIFFERENT_CALLS)
        if self._ended():
            raise _StuckCallError(DIFFERENT_CALLS)

    def _post(self, rank: int, kind: Kind, number: int, purpose: str, data: bytes) -> None:
        own = Frame(self._name, self._ranks, self._generation, number, purpose, kind, data)
        self._talk.post(rank, own)

    def hear(self, rank: int, frame: Frame) -> None:
        """Handles a message of a peer, on the bootstrap's thread."""
        with self._changed:
            if frame.generation < self._generation:
                return
            at = (frame.generation, frame.number)
            if frame.kind == "part":
                self._parts[at][rank] = frame
            elif frame.kind == "all":
                self._results[at] = msgspec.msgpack.decode(frame.data, type=list[bytes])
            else:
                statement = msgspec.msgpack.decode(frame.data, type=Statement, strict=True)
                self._statements[frame.generation][rank] = statement
                if frame.generation == self._generation:
                    self._state()
            self._changed.notify_all()

    def meet(self) -> bool:
        """Synchronises the ranks before closing; False if a rank does not arrive in time."""
        try:
            self.barrier()
        except BaseError:
            return False
        return True

    def close(self) -> None:
        """Frees the board."""
        self._board.close()
