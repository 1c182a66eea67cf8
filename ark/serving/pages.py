"""Manages the pages of the cache of keys and values: which are free, in use (possibly by several
requests), or kept for later requests. It does not access a device. Used by the scheduler.

A page whose `size` positions are all computed has a name: a hash of the text up to the page's end.
Requests with a common prefix share such pages. A named page without users is kept until its memory
is needed; the least recently used page is reused first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page. tokens: the tokens in it. before: the name of the text's page before
    it; empty for the first page.
    """
    return hashlib.sha256(before + np.array(tokens, np.int64).tobytes()).digest()


class PagePool:
    """A pool of pages, numbered from `first` on. share: True to keep full pages for requests with
    the same prefix.
    """

    def __init__(self, first: int, count: int, size: int, share: bool = True) -> None:
        self.size = size
        self.count = count
        self._share = share
        self._free = deque(range(first, first + count))
        self._users: dict[int, int] = {}  # by page in use: the number of its users
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # named pages without users, least recently used first
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """The number of pages that have no user and no name."""
        return len(self._free)

    @property
    def available(self) -> int:
        """The number of pages that `take` can return: free pages, and pages that are kept for later
        requests.
        """
        return len(self._free) + len(self._kept)

    def take(self) -> int | None:
        """A page for one user, with undefined contents; None if no page is available."""
        if self._free:
            page = self._free.popleft()
        elif self._kept:
            page, _ = self._kept.popitem(last=False)
            del self._by_name[self._names.pop(page)]
        else:
            return None
        self._users[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Removes one user from each page. The pages of a text's end will be reused before those of
        its beginning.
        """
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            del self._users[page]
            if page in self._names:
                self._kept[page] = None
            else:
                self._free.append(page)

    def publish(self, page: int, name: bytes) -> None:
        """Gives a page its name (a hash of the text up to its end), once it is full, so that other
        requests can share it.
        """
        if self._share and name not in self._by_name and page not in self._names:
            self._by_name[name], self._names[page] = page, name

    def match(
        self, tokens: Sequence[int], before: Sequence[bytes], root: bytes = b""
    ) -> tuple[list[int], list[bytes]]:
        """Finds named pages that continue a text, up to the first page that no request has
        computed. before: the names of the text's pages so far. root: the name in front of the first
        page, which distinguishes texts with different adapters. Returns the pages and their names;
        the caller becomes a user of each page.
        """
        pages: list[int] = []
        names: list[bytes] = []
        name = before[-1] if before else root
        for end in range((len(before) + 1) * self.size, len(tokens) + 1, self.size):
            name = page_name(name, tokens[end - self.size : end])
            page = self._by_name.get(name)
            if page is None:
                break
            self._kept.pop(page, None)
            self._users[page] = self._users.get(page, 0) + 1
            pages.append(page)
            names.append(name)
        return pages, names

    def check(self, used: Sequence[Sequence[int]]) -> None:
        """Raises AssertionError unless every page is free, kept, or used by exactly those lists of
        `used` that contain it.
        """
        counts: dict[int, int] = {}
        for pages in used:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        assert counts == self._users, (counts, self._users)
        groups = [set(self._free), set(self._kept), set(self._users)]
        assert sum(map(len, groups)) == len(set().union(*groups)) == self.count
        assert set(self._kept) <= set(self._names)
        assert {self._names[page]: page for page in self._names} == self._by_name
