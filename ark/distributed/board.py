"""Words in memory that the processes of one host share: for each rank of a lane, by the number of a
call, a fingerprint of all calls up to it.

A rank writes its word before it begins a call and reads its peers' while it waits and when the call
has ended, so comparing calls costs a store and a load for each peer. Called by
ark.distributed.lane.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os

SLOTS = 4096  # how many calls ahead a rank may be before its words are lost to a slower one
CHAIN_BITS = 40
_TAG = (1 << (64 - CHAIN_BITS)) - 1
_CHAIN = (1 << CHAIN_BITS) - 1
_FACTOR = 0x9E3779B97F4A7C15


@functools.lru_cache(maxsize=4096)
def fingerprint(text: str) -> int:
    """A number for a call, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chained(chain: int, fingerprint: int) -> int:
    """The fingerprint of the calls so far and one more."""
    return (chain * _FACTOR + fingerprint) & _CHAIN


def word_of(number: int, chain: int) -> int:
    """The word of a call; below 2^64, and never 0, which memory holds before the first call."""
    return (number & _TAG) << CHAIN_BITS | chain


class Board:
    """A rank's own words, and its peers' once they are mapped."""

    def __init__(self) -> None:
        self._own: memoryview | None = None
        self._handle = -1
        self._peers: list[memoryview] = []
        if hasattr(os, "memfd_create"):
            self._handle = os.memfd_create("ark-calls")
            os.ftruncate(self._handle, 8 * SLOTS)
            self._own = memoryview(mmap.mmap(self._handle, 8 * SLOTS)).cast("Q")

    @property
    def handle(self) -> str:
        """How other processes of the host find this rank's words; empty where none can."""
        return f"{os.getpid()}:{self._handle}" if self._own is not None else ""

    def map(self, handle: str) -> None:
        """Reads a peer's words from now on. A peer whose memory cannot be opened is left out: calls
        with it are compared over the bootstrap alone.
        """
        with contextlib.suppress(OSError, ValueError):
            pid, number = (int(part) for part in handle.split(":"))
            opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
            try:
                view = mmap.mmap(opened, 8 * SLOTS, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
            self._peers.append(memoryview(view).cast("Q"))

    def post(self, number: int, word: int) -> None:
        """This rank begins its call of that number."""
        if self._own is not None:
            self._own[number % SLOTS] = word

    def differs(self, number: int, word: int) -> bool:
        """Has a peer made another call of that number, or other calls before it?"""
        at = number % SLOTS
        for words in self._peers:
            seen = words[at]
            if seen != word and seen >> CHAIN_BITS == word >> CHAIN_BITS:
                return True
        return False

    def complete(self, number: int, word: int) -> bool:
        """Have all peers of this host made the same call of that number?"""
        at = number % SLOTS
        return not [words for words in self._peers if words[at] != word]  # faster than all()

    def close(self) -> None:
        """Gives the memory back; nothing is read or written from then on."""
        for words in self._peers:
            words.release()
        self._peers = []
        if self._own is not None:
            self._own.release()
            self._own = None
            os.close(self._handle)
