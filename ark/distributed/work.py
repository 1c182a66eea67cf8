"""The work objects that calls of torch.distributed return on the backend "ark". Created by
ark.distributed.torch and ark.distributed.messages.
"""

# torch declares several overloads of each method. This class overrides only the overload that
# torch's own functions call, so mypy's checks of overrides are disabled.
#
# mypy: disable-error-code="override"
from __future__ import annotations

from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from ark.runtime.bootstrap import Bootstrap


class ArkWork(Work):
    """The work object of a call that has already ended, or that runs on another thread."""

    def __init__(self, result: Any, running: Future[None] | None = None) -> None:
        super().__init__()
        self._result = result
        self._running = running

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Returns when the result is complete. Raises the call's error."""
        if self._running is not None:
            self._running.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        return self._running is None or self._running.done()

    def is_success(self) -> bool:
        return self.is_completed() and (self._running is None or self._running.exception() is None)

    def result(self) -> Any:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """A torch future of the result."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self.wait()
        future.set_result(self._result)
        return future


class ReceiveWork(ArkWork):
    """A receive whose sender may not be determined yet. `set_source` and `began` are called when
    the sender is known and when the receive begins.
    """

    def __init__(self, result: Any, job: Bootstrap, timeout_s: float) -> None:
        super().__init__(result)
        self._job, self._timeout_s = job, timeout_s
        self._source: int | None = None
        self._begun = False

    def began(self, running: Future[None]) -> None:
        self._running = running
        self._begun = True

    def set_source(self, source: int) -> None:
        """Sets the message's sender. Called before `began`, or before the receive ends."""
        self._source = source

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not self._begun:
            most = timeout.total_seconds() or self._timeout_s
            self._job.wait_until(lambda: self._begun, most, "a message from any rank")
        return super().wait(timeout)

    def is_completed(self) -> bool:
        return self._begun and super().is_completed()

    def _source_rank(self) -> int:
        """The sender's rank, which torch reads after the receive has ended."""
        assert self._source is not None
        return self._source
