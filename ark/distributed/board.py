"""Checks that the processes of one host make the same collective calls, by 64-bit words in shared
memory.

Each rank has a board, a ring buffer of WORDS_PER_RANK words that its peers can read. Before a rank
begins call number n, it writes a word at index n % WORDS_PER_RANK. The word has the call's number
and a fingerprint of all calls of the rank so far. The rank compares it with its peers' words while
it waits and after the call. A comparison costs one store, and one load per peer. Called by
ark.distributed.communicator.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import mmap
import os

# The number of words that a rank publishes on its board, one for each of its last calls. Other
# ranks compare them with the words of their own calls. If a rank is this many calls behind another
# rank, the words that it would compare with have been overwritten.
WORDS_PER_RANK = 4096
CHAIN_BITS = 40
_TAG = (1 << (64 - CHAIN_BITS)) - 1
_CHAIN = (1 << CHAIN_BITS) - 1
_HASH_MULTIPLIER = 0x9E3779B97F4A7C15


@functools.lru_cache(maxsize=4096)
def fingerprint(text: str) -> int:
    """A 64-bit hash of a call's text. Equal texts have the same hash on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chained(chain: int, fingerprint: int) -> int:
    """The fingerprint of a sequence of calls. chain: the fingerprint of all calls except the last.
    fingerprint: that of the last call.
    """
    return (chain * _HASH_MULTIPLIER + fingerprint) & _CHAIN


def word_of(number: int, chain: int) -> int:
    """The 64-bit number that a rank stores in shared memory for a call: the call's number and a
    hash of all calls so far. It is not 0, which the memory holds before the first call.
    """
    return (number & _TAG) << CHAIN_BITS | chain


class Board:
    """The words of this rank in shared memory, and the words of each peer that `map` has added."""

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
        """A handle with which other processes of the host can map this rank's words; empty if the
        system cannot share the memory.
        """
        return f"{os.getpid()}:{self._handle}" if self._own is not None else ""

    def map(self, handle: str) -> None:
        """Maps the shared memory in which a peer of this host records its calls. If the memory
        cannot be opened, the peer is omitted; its calls are then compared over the bootstrap only.
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
        """Writes this rank's word for call `number`, which the rank is about to begin."""
        if self._own is not None:
            self._own[number % WORDS_PER_RANK] = word

    def differs(self, number: int, word: int) -> bool:
        """True if a peer's word for call `number` differs from `word`. Then the peer has made a
        different call as number `number`, or earlier.
        """
        at = number % WORDS_PER_RANK
        for words in self._peers:
            seen = words[at]
            if seen != word and seen >> CHAIN_BITS == word >> CHAIN_BITS:
                return True
        return False

    def complete(self, number: int, word: int) -> bool:
        """True if all peers of this host have begun the same call `number` as this rank."""
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
