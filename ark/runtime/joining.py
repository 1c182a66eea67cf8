"""Connects a rank to rank 0, and opens the port of rank 0 to which the others connect.

Rank 0 listens on one of several consecutive ports. Programs of other jobs and users may listen on
the others. So a server that does not prove that it knows the job's secret is skipped. Called by
ark.runtime.bootstrap before any other message.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from dataclasses import dataclass

from ark.errors import InvalidUsageError, SystemError
from ark.runtime import cache
from ark.runtime import rendezvous as rdv
from ark.runtime.rank_info import SECRET, RankInfo

LISTEN = "ARK_LISTEN_ADDR"
_PROBE_S = 2.0  # how long the server at a port may take to prove that it is rank 0


@dataclass(frozen=True)
class Place:
    """The address of rank 0, and the consecutive ports that it may use."""

    address: str
    port: int
    ports: int

    @property
    def candidates(self) -> range:
        return range(self.port, min(self.port + self.ports, 65536))

    def __str__(self) -> str:
        last = f" to {self.port + self.ports - 1}" if self.ports > 1 else ""
        return f"{self.address}, port {self.port}{last}"


def words(rank_info: RankInfo) -> str:
    """The secret that only the ranks of one job share. It is the launcher's secret; if there is
    none, it is the user's own key together with the job's address and number.
    """
    if rank_info.secret or rank_info.world_size == 1:
        return rank_info.job
    try:
        own = cache.secret().hex()
    except (OSError, RuntimeError) as error:
        raise InvalidUsageError(
            f"the ranks have no common secret to authenticate each other: {error}; set {SECRET} "
            "to the same random word on all ranks"
        ) from error
    return f"{own} {rank_info.address}:{rank_info.port} {rank_info.job}"


def listen(place: Place) -> socket.socket:
    """A socket that listens on the first free port of the place. It accepts connections to that
    address only, unless ARK_LISTEN_ADDR names another local address (0.0.0.0: all).
    """
    taken = ""
    for candidate in place.candidates:
        try:
            family, _, _, _, where = socket.getaddrinfo(
                os.environ.get(LISTEN) or place.address, candidate, type=socket.SOCK_STREAM
            )[0]
            return socket.create_server((str(where[0]), candidate), family=family)
        except OSError as error:
            taken = error.strerror or str(error)
            if error.errno == errno.EADDRNOTAVAIL:
                taken += f" (if this machine has another local address, set {LISTEN})"
                break
    raise SystemError(
        f"rank 0 cannot serve the other ranks at {place}: {taken}; "
        f"set MASTER_PORT to a free port and MASTER_ADDR to rank 0's machine, the same on all ranks"
    )


def join(
    place: Place, rank: int, world_size: int, job: str, timeout_s: float, deadline: float
) -> tuple[rdv.Link, tuple[int, bytes]]:
    """Tries the ports in turn until rank 0 answers. Returns the connection and the first message.
    Raises SystemError when the deadline has passed. timeout_s: the time limit, for the error
    message.
    """
    about = {"rank": rank, "world_size": world_size, "host": socket.gethostname()}
    hello = json.dumps({**about, "pid": os.getpid()}).encode()
    stranger = ""
    reason = "nothing answers"
    while True:
        for candidate in place.candidates:
            try:
                sock = socket.create_connection((place.address, candidate), _PROBE_S)
            except OSError as error:
                reason = error.strerror or str(error) or reason
                continue
            link = rdv.Link(sock)
            try:
                return link, _introduce(link, job, hello, deadline)
            except OSError:
                link.close()
                stranger = f"; another program, job or user answers at port {candidate}"
        if time.monotonic() > deadline:
            raise SystemError(
                f"rank {rank} did not find rank 0 at {place} within {timeout_s:g} s "
                f"({reason}{stranger}); check that rank 0 runs, that MASTER_ADDR and MASTER_PORT "
                "are the same on all ranks, that no firewall blocks the port, and, on machines "
                f"without a shared home folder, that {SECRET} is the same random word on all ranks"
            )
        time.sleep(0.05)


def _introduce(link: rdv.Link, job: str, hello: bytes, deadline: float) -> tuple[int, bytes]:
    """Returns the first message of rank 0. Raises OSError if the server is not rank 0 of this
    job.
    """
    greeting = rdv.read_exactly(link.sock, len(rdv.MAGIC) + rdv.NONCE_BYTES)
    if not greeting.startswith(rdv.MAGIC):
        raise ConnectionError("the server does not speak ark's protocol")
    link.sock.settimeout(max(deadline - time.monotonic(), _PROBE_S))
    # Rank and server have different secrets. Both sides then close the connection.
    if not rdv.prove(link, job, greeting[len(rdv.MAGIC) :], hello):
        raise ConnectionError("the server does not know the job's secret")
    return link.receive()
