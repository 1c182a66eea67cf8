"""A subset of a job's ranks that synchronises over the job's bootstrap. Pairs of ranks use it while
their link is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.errors import SystemError
from ark.runtime.bootstrap import Bootstrap


class Members:
    """A subset `ranks` of a job's ranks with the interface that executors use to synchronise ranks
    (ark.runtime.run.Ranks). label: a name that is unique among such subsets.
    """

    def __init__(self, job: Bootstrap, ranks: Sequence[int], label: str) -> None:
        self._job = job
        self._ranks = tuple(ranks)
        self._label = f"{label} {self._ranks}"
        self.rank = self._ranks.index(job.rank)
        self.world_size = len(self._ranks)

    def all_gather(self, data: bytes) -> list[bytes]:
        """The data of every member, in their order."""
        others = [r for r in self._ranks if r != self._job.rank]
        for other in others:
            self._job.post(other, self._label, data)
        received = {r: self._job.collect(r, self._label) for r in others}
        return [received.get(r, data) for r in self._ranks]

    def barrier(self, label: str = "barrier") -> None:
        """Returns when every member has called it."""
        self.all_gather(label.encode())

    def check_same(self, label: str, digest: str) -> None:
        """Raises SystemError unless all members pass the same digest."""
        if len(set(self.all_gather(digest.encode()))) > 1:
            raise SystemError(f"the ranks {list(self._ranks)} disagree on {label}")

    def failure(self) -> str | None:
        return self._job.failure()

    def abort(self, message: str) -> None:
        self._job.abort(message)
