"""Which pages of keys and values are free, shared or kept: plain data, no device. Used by the
scheduler.

A page that holds `size` positions of a text, all computed, has a name: a hash of the text up to its
end. Requests whose texts begin alike share such pages, and a page that no request uses any more is
kept under its name until its memory is needed, the least recently used first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence

import numpy as np


def page_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a page of these tokens behind the page named `before`, empty for the first."""
    return hashlib.sha256(before + np.array(tokens, np.int64).tobytes()).digest()


class PagePool:
    """Pages numbered from `first` on. share: keep full pages for requests that begin alike."""

    def __init__(self, first: int, count: int, size: int, share: bool = True) -> None:
        self.size = size
        self.count = count
        self._share = share
        self._free = deque(range(first, first + count))
        self._users: dict[int, int] = {}  # of pages in use
        self._kept: OrderedDict[int, None] = (
            OrderedDict()
        )  # named pages without users, oldest first
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Pages without users that hold no text for later requests."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self._free) + len(self._kept)

    def take(self) -> int | None:
        """A page for one user, or None. Its contents are any."""
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
        """A user gives its pages back. The end of a text is forgotten before its beginning."""
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
        """A used page is full, and holds the text of that name."""
        if self._share and name not in self._by_name and page not in self._names:
            self._by_name[name], self._names[page] = page, name

    def match(
        self, tokens: Sequence[int], before: Sequence[bytes], root: bytes = b""
    ) -> tuple[list[int], list[bytes]]:
        """The pages that hold a text behind its pages named `before`, as far as there are any, and
        their names. The caller becomes a user of each. root: what stands before the first page's
        name, by which texts under different adapters differ.
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
        """AssertionError unless every page is either free, kept, or used by exactly these lists."""
        counts: dict[int, int] = {}
        for pages in used:
            for page in pages:
                counts[page] = counts.get(page, 0) + 1
        assert counts == self._users, (counts, self._users)
        groups = [set(self._free), set(self._kept), set(self._users)]
        assert sum(map(len, groups)) == len(set().union(*groups)) == self.count
        assert set(self._kept) <= set(self._names)
        assert {self._names[page]: page for page in self._names} == self._by_name
