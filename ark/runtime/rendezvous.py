"""The server of the bootstrap, which runs on rank 0: a small TCP server through which all ranks of
a job communicate.

Every rank, including rank 0, has one connection to it. The server accepts ranks that prove that
they know the job's secret. It collects one message per rank and sends all of them to every rank. If
a rank is lost or fails, it reports this to every rank at once. Used by ark.runtime.bootstrap only.

Wire format: frames of (kind u8, length u32, body), little-endian; bodies are JSON or raw bytes. The
server sends first (MAGIC and a nonce), so that another program on either end is recognised. The
rank answers with its own nonce and with a proof that it knows the job's secret, an HMAC-SHA256 over
both nonces. The server answers with its own proof. Each side closes the connection if the other's
proof is wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ark.backend import threads
from ark.errors import SystemError

MAGIC = b"ark-rdv2"
NONCE_BYTES = 16
MAX_FRAME_BYTES = 256 << 20
HANDSHAKE_S = 10.0

HELLO, PROVEN, WELCOME, REFUSE, CONTRIBUTE, GATHERED, PING, FAILURE, BYE, POST = range(1, 11)

_HEADER = struct.Struct("<BI")


class Link:
    """A connection over which messages (frames) are sent. `send` may be called from several
    threads.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: int, body: bytes = b"") -> None:
        """Sends one frame; raises OSError if the other side has closed."""
        with self._lock:
            self.sock.sendall(_HEADER.pack(kind, len(body)) + body)

    def receive(self, limit: int = MAX_FRAME_BYTES) -> tuple[int, bytes]:
        """Returns the next frame. Raises ConnectionError if the stream ends or does not consist of
        frames.
        """
        kind, length = _HEADER.unpack(read_exactly(self.sock, _HEADER.size))
        if not HELLO <= kind <= POST or length > limit:
            raise ConnectionError("the other side does not send frames of ark's protocol")
        return kind, read_exactly(self.sock, length)

    def close(self) -> None:
        """Shuts the connection down, which ends a waiting `receive`."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


def read_exactly(sock: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes; raises ConnectionError if the stream ends earlier."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        if not piece:
            raise ConnectionError("the connection ended")
        data += piece
    return bytes(data)


def proof(job: str, side: bytes, nonces: bytes, hello: bytes) -> bytes:
    """The HMAC by which a rank or the server proves, for these nonces, that it knows the job's
    secret.

    side: b"rank" or b"server". It is part of the proof, so that one side cannot send back the proof
        that it has received.
    """
    return hmac.new(job.encode(), side + nonces + hello, hashlib.sha256).digest()


def prove(link: Link, job: str, nonce: bytes, hello: bytes) -> bool:
    """Authenticates a rank and the server to each other; called by the rank. Returns False if the
    server does not know the job's secret.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    nonces = nonce + mine
    link.send(HELLO, hello + mine + proof(job, b"rank", nonces, hello))
    kind, shown = link.receive(limit=4096)
    return kind == PROVEN and hmac.compare_digest(shown, proof(job, b"server", nonces, hello))


def pack_gather(label: str, payload: bytes) -> bytes:
    """The body of a gather frame: the length of the label, the label, the payload."""
    name = label.encode()
    return struct.pack("<H", len(name)) + name + payload


def unpack_gather(body: bytes) -> tuple[str, bytes]:
    """The label and the payload of a gather frame."""
    (length,) = struct.unpack_from("<H", body)
    return body[2 : 2 + length].decode(), body[2 + length :]


def pack_post(rank: int, label: str, payload: bytes) -> bytes:
    """The body of a message to one rank. In messages from the server, `rank` is the sender."""
    return struct.pack("<I", rank) + pack_gather(label, payload)


def unpack_post(body: bytes) -> tuple[int, str, bytes]:
    (rank,) = struct.unpack_from("<I", body)
    return rank, *unpack_gather(body[4:])


@dataclass
class _Member:
    link: Link
    who: str
    left: bool = False
    given: list[tuple[str, bytes]] = field(default_factory=list)


class Server:
    """The server that connects the ranks of one job; `close` ends its threads. Times are in
    seconds.
    """

    def __init__(
        self, listener: socket.socket, world_size: int, job: str, silence_s: float
    ) -> None:
        self._listener = listener
        self._world_size = world_size
        self._job = job
        self._silence_s = silence_s
        self._lock = threading.Condition()
        self._members: dict[int, _Member] = {}
        self._failure = ""
        self._closing = False
        listener.settimeout(0.2)
        self._spawn(self._accept)
        self._spawn(self._beat)

    @staticmethod
    def _spawn(target: Callable[..., None], *args: Any) -> None:
        threads.start(target, *args, name="ark-rendezvous")

    def missing(self) -> list[int]:
        """Ranks that have not joined."""
        with self._lock:
            return [r for r in range(self._world_size) if r not in self._members]

    def fail(self, message: str, spare: int = -1) -> None:
        """Sends the reason why the job has failed to every rank except `spare`. If this is called
        several times, only the first reason counts.
        """
        with self._lock:
            if self._failure:
                return
            self._failure = message
            # Members are informed in descending order of ranks. Rank 0 is the last, because its
            # process, which runs this server, may end at once.
            last_to_first = sorted(self._members.items(), reverse=True)
            members = [m for r, m in last_to_first if r != spare and not m.left]
        for member in members:
            with contextlib.suppress(OSError):
                member.link.send(FAILURE, message.encode())

    def close(self, wait_s: float) -> None:
        """Waits for the other ranks to leave, then closes the remaining connections."""
        with self._lock:
            self._lock.wait_for(lambda: all(m.left for m in self._members.values()), wait_s)
            self._closing = True
            members = list(self._members.values())
        for member in members:
            with contextlib.suppress(OSError):
                member.link.send(BYE)
            member.link.close()
        self._listener.close()

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            try:
                self._spawn(self._serve, sock, f"{address[0]}:{address[1]}")
            except SystemError:  # too many open files; the rank will try again
                sock.close()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        sock.settimeout(HANDSHAKE_S)
        try:
            rank, member = self._let_in(Link(sock), peer)
        except (OSError, ValueError, KeyError, TypeError, struct.error):
            sock.close()
            return
        sock.settimeout(self._silence_s)
        try:
            while True:
                kind, body = member.link.receive()
                if kind == CONTRIBUTE:
                    self._contributed(rank, member, *unpack_gather(body))
                elif kind == POST:
                    self._post(rank, *unpack_post(body))
                elif kind == FAILURE:
                    self.fail(f"rank {rank} ({member.who}) reports: {body.decode()}", spare=rank)
                elif kind == BYE:
                    self._leave(rank, member)
                    return
        except (OSError, ValueError, struct.error) as error:
            silent = isinstance(error, TimeoutError)
            how = f"sent nothing for {self._silence_s:g} s" if silent else "ended without a message"
            self.fail(f"rank {rank} ({member.who}) {how}; that rank's output has the reason", rank)
            self._leave(rank, member)
        finally:
            member.link.close()

    def _let_in(self, link: Link, peer: str) -> tuple[int, _Member]:
        nonce = secrets.token_bytes(NONCE_BYTES)
        link.sock.sendall(MAGIC + nonce)
        kind, body = link.receive(limit=4096)
        hello, theirs, shown = body[: -32 - NONCE_BYTES], body[-32 - NONCE_BYTES : -32], body[-32:]
        nonces = nonce + theirs
        expected = proof(self._job, b"rank", nonces, hello)
        if kind != HELLO or not hmac.compare_digest(shown, expected):
            raise ConnectionError("the rank does not know the job's secret")
        link.send(PROVEN, proof(self._job, b"server", nonces, hello))
        greeting = json.loads(hello)
        rank, size = int(greeting["rank"]), int(greeting["world_size"])
        member = _Member(link, f"process {int(greeting['pid'])} on {greeting['host']!s:.64}")
        refusal = ""
        with self._lock:
            if size != self._world_size:
                refusal = (
                    f"rank {rank} was started for {size} ranks but rank 0 for {self._world_size}; "
                    f"start all ranks with the same world size"
                )
            elif not 0 <= rank < size:
                refusal = (
                    f"rank {rank} is out of range for {size} ranks; it must be at least 0 and "
                    "below the world size"
                )
            elif rank in self._members:
                refusal = (
                    f"rank {rank} was started twice: {self._members[rank].who} and "
                    f"{member.who}; give every process its own rank"
                )
            else:
                self._members[rank] = member
            complete = len(self._members) == self._world_size
        if refusal:
            link.send(REFUSE, refusal.encode())
            self.fail(refusal)
            raise ConnectionError(refusal)
        if self._failure:
            link.send(FAILURE, self._failure.encode())
        elif not complete:
            link.send(PING)
        else:
            for other in list(self._members.values()):
                with contextlib.suppress(OSError):
                    other.link.send(WELCOME)
        return rank, member

    def _contributed(self, rank: int, member: _Member, label: str, payload: bytes) -> None:
        trouble = ""
        ready: list[bytes] = []
        with self._lock:
            member.given.append((label, payload))
            position = len(member.given)
            for other, theirs in self._members.items():
                if theirs.left and len(theirs.given) < position:
                    trouble = f"rank {other} has left, but rank {rank} waits for it at {label!r}"
                elif len(theirs.given) >= position and theirs.given[position - 1][0] != label:
                    trouble = (
                        f"rank {rank} waits at {label!r}, rank {other} at "
                        f"{theirs.given[position - 1][0]!r}; all ranks must run the same program"
                    )
            if not trouble and all(m.given for m in self._members.values()):
                ready = [self._members[r].given[0][1] for r in range(self._world_size)]
                for m in self._members.values():
                    m.given.pop(0)
        if trouble:
            self.fail(trouble)
        elif ready:
            body = b"".join(struct.pack("<I", len(p)) + p for p in ready)
            for m in list(self._members.values()):
                with contextlib.suppress(OSError):
                    m.link.send(GATHERED, body)

    def _post(self, rank: int, target: int, label: str, payload: bytes) -> None:
        other = self._members.get(target)
        if other is None or other.left:
            self.fail(f"rank {target} has left the job, but rank {rank} sends it {label!r}")
            return
        with contextlib.suppress(OSError):  # the thread of this member reports its end
            other.link.send(POST, pack_post(rank, label, payload))

    def _leave(self, rank: int, member: _Member) -> None:
        waiting = ""
        with self._lock:
            member.left = True
            for other, theirs in self._members.items():
                if len(theirs.given) > len(member.given):
                    waiting = (
                        f"rank {rank} has left, but rank {other} waits for it at "
                        f"{theirs.given[-1][0]!r}"
                    )
            self._lock.notify_all()
        if waiting and not self._failure:
            self.fail(waiting)

    def _beat(self) -> None:
        while not self._closing:
            for member in list(self._members.values()):
                if not member.left:
                    with contextlib.suppress(OSError):
                        member.link.send(PING)
            time.sleep(self._silence_s / 5)
