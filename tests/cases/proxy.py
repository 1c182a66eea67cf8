"""Cases and helpers of tests/multi/test_proxy.py, which other tests use too."""

from __future__ import annotations

import ark
from ark.ir.dtype import int32
from tests.cases import channels


def put_and_send(rank: int) -> None:
    """The model of each of two ranks: a put to a part of the peer's symmetric memory, and a
    message, both by the proxy.
    """
    x, inbox = channels.counting(), ark.comm.symmetric([channels.INBOX_ELEMENTS + 5], int32)
    channel = ark.comm.channel(1 - rank, engine="dma")
    if rank == 0:
        channel.put(x, inbox[5:], signal=True)
        channel.send(x)
    else:
        (arrived,) = channel.wait(inbox)
        message = channel.recv(ark.tensor([channels.INBOX_ELEMENTS], int32))
        channels.add_up(ark.sub(ark.mul(message, 2), arrived[5:]))


def fetch(rank: int) -> None:
    x, shared = channels.counting(), ark.comm.symmetric([channels.INBOX_ELEMENTS], int32)
    channel = ark.comm.channel(1 - rank, engine="dma")
    if rank == 0:
        channel.signal(after=[ark.copy(x, output=shared)])
    else:
        channel.wait()
        channels.add_up(channel.get(shared))
