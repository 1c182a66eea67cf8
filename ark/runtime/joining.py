"""How a rank gets to rank 0, and rank 0 to the port at which the others look for it.

A job may have several ports to choose from, and other programs, other jobs and other users may
answer at them: whoever does not know the job's words is passed over. Called by
ark.runtime.bootstrap before anything else is said.
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
_PROBE_S = 2.0  # how long whoever holds a port may take to show that it is rank 0


@dataclass(frozen=True)
class Place:
    """Where rank 0 is looked for: at one of so many consecutive ports of an address."""

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
    """What the ranks of one job know and nobody else: the launcher's secret, or the user's own key
    with the job's address and number.
    """
    if rank_info.secret or rank_info.world_size == 1:
        return rank_info.job
    try:
        own = cache.secret().hex()
    except (OSError, RuntimeError) as error:
        raise InvalidUsageError(
            f"the ranks have no secret by which they know each other: {error}; set {SECRET} to one "
            "random word on all ranks"
        ) from error
    return f"{own} {rank_info.address}:{rank_info.port} {rank_info.job}"


def listen(place: Place) -> socket.socket:
    """A listening socket on the first free port of the address; of no other, unless the user says
    in ARK_LISTEN_ADDR that this one is not the machine's own (0.0.0.0: all).
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
                taken += f" (where others reach this machine by another address, set {LISTEN})"
                break
    raise SystemError(
        f"rank 0 cannot serve the other ranks at {place}: {taken}; "
        f"set MASTER_PORT to a free port and MASTER_ADDR to rank 0's machine, the same on all ranks"
    )


def join(
    place: Place, rank: int, world_size: int, job: str, timeout_s: float, deadline: float
) -> tuple[rdv.Link, tuple[int, bytes]]:
    """Tries the ports in turn until rank 0 answers, or SystemError when the deadline has passed;
    the connection, and the first message that came over it. timeout_s: for the error's words.
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
                stranger = f"; another program answers at port {candidate}, or another job or user"
        if time.monotonic() > deadline:
            raise SystemError(
                f"rank {rank} looked for rank 0 at {place}, for "
                f"{timeout_s:g} s and did not find it ({reason}{stranger}); check that rank 0 "
                f"runs, that MASTER_ADDR and MASTER_PORT are the same on all ranks, that no "
                f"firewall stands between, and, on machines without a shared home folder, that "
                f"{SECRET} is one random word on all ranks"
            )
        time.sleep(0.05)


def _introduce(link: rdv.Link, job: str, hello: bytes, deadline: float) -> tuple[int, bytes]:
    """What rank 0 says first; OSError if it is not rank 0 of this job that answers."""
    greeting = rdv.read_exactly(link.sock, len(rdv.MAGIC) + rdv.NONCE)
    if not greeting.startswith(rdv.MAGIC):
        raise ConnectionError("not an ark rendezvous")
    link.sock.settimeout(max(deadline - time.monotonic(), _PROBE_S))
    # Whoever knows other words is hung up on, on either side; a member hears something at once.
    if not rdv.prove(link, job, greeting[len(rdv.MAGIC) :], hello):
        raise ConnectionError("not of this job")
    return link.receive()
