"""Connects the ranks of a job and detects when one of them ends.

Before a kernel runs, ranks exchange memory handles and compare their plans through a Bootstrap.
While it runs, the connection reports quickly when another rank ends or fails, so that no kernel
waits for a rank that has ended. Tensors are never sent over it. Called by ark.runtime;
ark.runtime.rendezvous is the server, which runs on rank 0.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from ark.backend import threads
from ark.errors import InvalidUsageError, SystemError
from ark.runtime import rendezvous as rdv
from ark.runtime.joining import Place, join, listen, words
from ark.runtime.rank_info import RankInfo, rank_from_environment


class Bootstrap:
    """One rank's membership of a job. It is a context manager; an exception inside it is reported
    to the other ranks.

    Every method that waits raises ark.errors.SystemError with the reason, on all ranks, as soon as
    the job has failed.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._changed = threading.Condition()
        self._failure: str | None = None
        self._results: list[bytes] = []
        self._posts: dict[tuple[int, str], list[bytes]] = {}
        self._hears: dict[str, Callable[[int, bytes], None]] = {}
        self._counts: Counter[str] = Counter()
        self._welcome = world_size == 1
        self._closed = False
        self._link: rdv.Link | None = None
        self._server: rdv.Server | None = None

    @classmethod
    def connect(
        cls,
        rank: int,
        world_size: int,
        address: str,
        port: int,
        timeout_s: float = 30.0,
        *,
        job: str = "",
        ports: int = 1,
        silence_s: float = 15.0,
    ) -> Bootstrap:
        """Joins the job that rank 0 serves at address:port; returns when all ranks have joined.

        job: a secret that only the ranks of one job share; connections without it are rejected.
        ports: how many consecutive ports rank 0 may try. silence_s: after this time without a
        message a machine counts as lost. (The end of a process is noticed at once.) Raises
        SystemError if the ports are taken, rank 0 does not answer, or a rank does not join within
        timeout_s.
        """
        if world_size < 1 or not 0 <= rank < world_size:
            raise InvalidUsageError(
                f"rank {rank} is out of range for {world_size} ranks; it must be at least 0 and "
                "below the world size"
            )
        self = cls(rank, world_size, timeout_s)
        if world_size == 1:
            return self
        deadline = time.monotonic() + timeout_s
        try:
            place = Place(address, port, ports)
            if rank == 0:
                listener = listen(place)
                self._server = rdv.Server(listener, world_size, job, silence_s)
                own, port = listener.getsockname()[:2]
                place = Place({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(own, own), port, 1)
            self._link, first = join(place, rank, world_size, job, timeout_s, deadline)
            self._handle(*first)
            self._link.sock.settimeout(silence_s)
            threads.start(self._listen_to, silence_s)
            threads.start(self._beat, silence_s / 5)
            # If ranks are missing, rank 0's error names them. The other ranks wait one second
            # longer than rank 0, so that they receive this error instead of timing out themselves.
            grace = 0.0 if rank == 0 else 1.0
            self._wait(lambda: self._welcome, deadline + grace, "the start", self._who_is_missing)
        except BaseException:
            self._drop()
            raise
        return self

    @classmethod
    def from_environment(cls, rank_info: RankInfo | None = None) -> Bootstrap:
        """Joins the job that the launcher's environment variables describe."""
        here = rank_info or rank_from_environment()
        return cls.connect(
            here.rank,
            here.world_size,
            here.address,
            here.port,
            here.join_s,
            job=words(here),
            ports=here.ports,
        )

    def all_gather(
        self, payload: bytes, label: str = "all_gather", timeout_s: float = 600.0
    ) -> list[bytes]:
        """Returns every rank's payload, in rank order; all ranks must use the same label.

        Waits up to timeout_s for a slow rank. Raises SystemError at once if a rank has ended.
        """
        if self._link is None:
            return [payload]
        self._raise_if_failed()
        self._send(rdv.CONTRIBUTE, rdv.pack_gather(label, payload))
        self._wait(lambda: bool(self._results), time.monotonic() + timeout_s, repr(label))
        with self._changed:
            body = self._results.pop(0)
        parts: list[bytes] = []
        at = 0
        while at < len(body):
            (size,) = struct.unpack_from("<I", body, at)
            parts.append(body[at + 4 : at + 4 + size])
            at += 4 + size
        return parts

    def barrier(self, label: str = "barrier", timeout_s: float = 600.0) -> None:
        """Returns when every rank has called it."""
        self.all_gather(b"", label, timeout_s)

    def post(self, rank: int, label: str, payload: bytes) -> None:
        """Sends a message to one rank, which receives it by `collect`; returns at once."""
        self._raise_if_failed()
        self._send(rdv.POST, rdv.pack_post(rank, label, payload))

    def collect(self, rank: int, label: str, timeout_s: float = 600.0) -> bytes:
        """Returns the next message with that label from a rank. Raises SystemError at once if the
        rank has ended.
        """
        return self.collect_any([rank], label, timeout_s)[1]

    def collect_any(
        self, ranks: Sequence[int], label: str, timeout_s: float = 600.0
    ) -> tuple[int, bytes]:
        """Returns (sender, message) for the next message with that label from any of these
        ranks.
        """

        def senders() -> list[int]:
            return [rank for rank in ranks if self._posts.get((rank, label))]

        self._wait(lambda: bool(senders()), time.monotonic() + timeout_s, repr(label))
        with self._changed:
            first = senders()[0]
            return first, self._posts[first, label].pop(0)

    def hear(self, label: str, heard: Callable[[int, bytes], None]) -> None:
        """Registers a function that is called with the sender's rank and the body of each message
        with that label. It runs on the receiving thread, so it must not wait for other ranks.
        """
        with self._changed:
            self._hears[label] = heard
            before = [key for key in self._posts if key[1] == label]
            early = [(key[0], body) for key in before for body in self._posts.pop(key)]
        for rank, body in early:
            heard(rank, body)

    def count(self, name: str) -> int:
        """Returns how often this rank has called `count` with that name before. It is used to
        number objects that all ranks create in the same order: every rank gets the same number for
        them.
        """
        with self._changed:
            self._counts[name] += 1
            return self._counts[name] - 1

    def wait_until(self, ready: Callable[[], bool], timeout_s: float, awaited: str) -> None:
        """Returns when `ready()` is true. `ready` is called after each received message. awaited: a
        description of the things that have not arrived, for the error message of a timeout.
        """
        self._wait(ready, time.monotonic() + timeout_s, awaited)

    def check_same(self, label: str, digest: str) -> None:
        """Raises SystemError, which lists the digests of all ranks, on every rank unless all ranks
        pass the same digest.
        """
        digests = [part.decode() for part in self.all_gather(digest.encode(), f"check of {label}")]
        if len(set(digests)) > 1:
            raise SystemError(
                f"the ranks disagree on {label}: {_by_value(digests)}; start every rank with "
                "the same model, options, machine and version of ark"
            )

    def failure(self) -> str | None:
        """The reason why the job has failed, or None."""
        return self._failure

    def abort(self, message: str) -> None:
        """Reports to every other rank that this one has failed. May be called twice; never
        raises.
        """
        with contextlib.suppress(OSError):
            if self._link is not None and not self._closed and self._failure is None:
                self._link.send(rdv.FAILURE, message.encode())
        self._fail(f"rank {self.rank} (this one) reports: {message}")

    def close(self, wait_s: float = 5.0) -> None:
        """Leaves the job. Rank 0 waits up to wait_s for the others to leave. May be called
        twice.
        """
        if self._closed:
            return
        self._closed = True
        if self._link is not None:
            with contextlib.suppress(OSError):
                self._link.send(rdv.BYE)
        if self._server is not None:
            self._server.close(wait_s)
        self._drop()

    def __enter__(self) -> Bootstrap:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is not None and self._failure is None:
            self.abort(str(error) or type(error).__name__)
        self.close()

    # The connection.

    def _listen_to(self, silence_s: float) -> None:
        assert self._link is not None
        try:
            while not self._closed:
                self._handle(*self._link.receive())
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            how = f"sent nothing for {silence_s:g} s" if silent else "ended without a message"
            if not self._closed:
                self._fail(f"rank 0 {how}; its output has the reason")

    def _handle(self, kind: int, body: bytes) -> None:
        if kind in (rdv.REFUSE, rdv.FAILURE):
            self._fail(body.decode())
        elif kind == rdv.BYE and not self._closed:
            self._fail("rank 0 has left the job")
        heard = None
        with self._changed:
            if kind == rdv.WELCOME:
                self._welcome = True
            elif kind == rdv.GATHERED:
                self._results.append(body)
            elif kind == rdv.POST:
                rank, label, payload = rdv.unpack_post(body)
                heard = self._hears.get(label)
                if heard is None:
                    self._posts.setdefault((rank, label), []).append(payload)
            self._changed.notify_all()
        if heard is not None:
            heard(rank, payload)
            with self._changed:
                self._changed.notify_all()

    def _beat(self, interval_s: float) -> None:
        while not self._closed and self._failure is None:
            with contextlib.suppress(OSError):
                if self._link is not None:
                    self._link.send(rdv.PING)
            time.sleep(interval_s)

    def _send(self, kind: int, body: bytes) -> None:
        assert self._link is not None
        try:
            self._link.send(kind, body)
        except OSError as error:
            self._raise_if_failed()
            raise SystemError(
                f"rank {self.rank} lost its connection to rank 0 ({error}); rank 0's output has "
                "the reason"
            ) from error

    def _wait(
        self,
        ready: Callable[[], bool],
        deadline: float,
        awaited: str,
        detail: Callable[[], str] = lambda: "",
    ) -> None:
        with self._changed:
            while not ready() and self._failure is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, 1.0))
            if ready():
                return
        self._raise_if_failed()
        message = f"not all of {self.world_size} ranks reached {awaited} in time{detail()}"
        if self._server is not None:
            self._server.fail(message, spare=0)
        self.abort(message)
        raise SystemError(message)

    def _who_is_missing(self) -> str:
        if self._server is None:
            return ""
        names = ", ".join(str(r) for r in self._server.missing())
        return (
            f": rank {names} did not join within {self.timeout_s:g} s; check that it was "
            "started and can reach this machine"
        )

    def _fail(self, message: str) -> None:
        with self._changed:
            if self._failure is not None:
                return
            self._failure = message
            self._changed.notify_all()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise SystemError(self._failure)

    def _drop(self) -> None:
        self._closed = True
        if self._server is not None:
            self._server.close(1.0)
        if self._link is not None:
            self._link.close()


def _by_value(values: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(str(rank))
    return "; ".join(f"rank {', '.join(rs)} has {value!r}" for value, rs in ranks.items())
