"""Words in memory that the processes of one host share: for each rank of a communicator, at the
number of each call, a fingerprint of all its calls so far.

A rank writes its word before it begins a call, and reads its peers' words while it waits and after
the call, so comparing calls takes a store and one load per peer. Called by
ark.distributed.communicator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os

WORDS_PER_RANK = 4096  # how many calls a rank may be ahead before a slower one misses its words
CHAIN_BITS = 40
_TAG = (1 << (64 - CHAIN_BITS)) - 1
_CHAIN = (1 << CHAIN_BITS) - 1
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


@functools.lru_cache(maxsize=4096)
def fingerprint(text: str) -> int:
    """A number for a call, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chained(chain: int, fingerprint: int) -> int:
    """The fingerprint of the calls so far and one more."""
    return (chain * _HASH_MULTIPLIER + fingerprint) & _CHAIN


def word_of(number: int, chain: int) -> int:
    """The word of a call: below 2^64, and never 0, the value of memory before the first call."""
    return (number & _TAG) << CHAIN_BITS | chain


class Board:
    """A rank's own words, and its peers' after they are mapped."""

    def __init__(self) -> None:
        self._own: memoryview | None = None
        self._handle = -1
        self._peers: list[memoryview] = []
        if hasattr(os, "memfd_create"):
            self._handle = os.memfd_create("ark-calls")
            os.ftruncate(self._handle, 8 * WORDS_PER_RANK)
            self._own = memoryview(mmap.mmap(self._handle, 8 * WORDS_PER_RANK)).cast("Q")

    @property
    def handle(self) -> str:
        """A handle with which other processes of the host can map this rank's words; empty if they
        cannot.
        """
        return f"{os.getpid()}:{self._handle}" if self._own is not None else ""

    def map(self, handle: str) -> None:
        """Maps a peer's words. A peer whose memory cannot be opened is omitted: its calls are
        compared over the bootstrap only.
        """
        with contextlib.suppress(OSError, ValueError):
            pid, number = (int(part) for part in handle.split(":"))
            opened = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY)
            try:
                view = mmap.mmap(opened, 8 * WORDS_PER_RANK, prot=mmap.PROT_READ)
            finally:
                os.close(opened)
            self._peers.append(memoryview(view).cast("Q"))

    def post(self, number: int, word: int) -> None:
        """Records that this rank begins its call of that number."""
        if self._own is not None:
            self._own[number % WORDS_PER_RANK] = word

    def differs(self, number: int, word: int) -> bool:
        """True if a peer made another call of that number, or other calls before it."""
        at = number % WORDS_PER_RANK
        for words in self._peers:
            seen = words[at]
            if seen != word and seen >> CHAIN_BITS == word >> CHAIN_BITS:
                return True
        return False

    def complete(self, number: int, word: int) -> bool:
        """True if all peers of this host have made the same call of that number."""
        at = number % WORDS_PER_RANK
        return not [words for words in self._peers if words[at] != word]  # faster than all()

    def close(self) -> None:
        """Frees the memory; it must not be read or written afterwards."""
        for words in self._peers:
            words.release()
        self._peers = []
        if self._own is not None:
            self._own.release()
            self._own = None
            os.close(self._handle)
