"""Checks that the processes of one host make the same collective calls, by 64-bit words in shared
memory.

A rank's board is a ring of WORDS_PER_RANK words. For each call the rank writes a word with the
call's number and a fingerprint of all its calls so far, at the index number modulo WORDS_PER_RANK.
A rank writes its word before it begins a call, and reads its peers' words while it waits and after
the call. A comparison costs one store, and one load per peer. Called by
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
    """A hash of a call's text, the same on all ranks."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def chained(chain: int, fingerprint: int) -> int:
    """The fingerprint of a sequence of calls: `chain` is that of the earlier calls, `fingerprint`
    that of the call that follows them.
    """
    return (chain * _HASH_MULTIPLIER + fingerprint) & _CHAIN


def word_of(number: int, chain: int) -> int:
    """The 64-bit number that a rank stores in shared memory for a call: the call's number and a
    hash of all calls so far. It is not 0, which the memory holds before the first call.
    """
    return (number & _TAG) << CHAIN_BITS | chain


class Board:
    """The words of a rank, and of its peers after `map`."""

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
        """Records that this rank begins the call of that number."""
        if self._own is not None:
            self._own[number % WORDS_PER_RANK] = word

    def differs(self, number: int, word: int) -> bool:
        """True if a peer's word for that number differs: the peer has made another call, now or
        earlier.
        """
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
