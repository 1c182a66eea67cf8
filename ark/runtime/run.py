"""A launch in progress: watched, released iteration by iteration, aborted, explained.

Created by `Executor.start`. Called by ark.runtime.runtime, ark.models.generate and ark.bench.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from ark.backend.devices import Launch
from ark.errors import BaseError, GpuError
from ark.runtime import live


class Ranks(Protocol):
    """The part of ark.runtime.bootstrap.Bootstrap that a launch uses."""

    def all_gather(self, data: bytes) -> list[bytes]: ...

    def barrier(self, label: str = "barrier") -> None: ...

    def check_same(self, label: str, digest: str) -> None: ...

    def failure(self) -> str | None: ...

    def abort(self, message: str) -> None: ...


# The time that a kernel may take to leave after the abort word is set. It checks the word once per
# iteration and in every wait.
STOP_S = 10.0


class Run:
    """A launch in progress.

    host: its ArkHost, as an array of one element. iterations: the number that was launched. ranks:
    the ranks of the job, if several. budget_s: the budget of a wait on the device. explain: makes
    the error message from the host block's record. trouble: the error that stopped the proxy, or
    empty.
    """

    def __init__(
        self,
        launch: Launch,
        host: np.ndarray,
        iterations: int,
        ranks: Ranks | None,
        budget_s: float,
        explain: Callable[[Any], str],
        trouble: Callable[[], str] | None = None,
    ) -> None:
        self._launch = launch
        self.iterations = iterations
        self._ranks = ranks
        self._budget_s = budget_s
        self._explain = explain
        self._trouble = trouble
        self.host = host
        self._failed = False
        self._asked_to_quit = False
        self.detached = False
        self.forked = False
        live.add(self)

    def detach(self) -> None:
        """Copies the host block: the launch has ended and its memory will be freed."""
        copied = bytearray(
            self.host.tobytes()
        )  # numpy's own copy of a record copies field by field
        self.host = np.frombuffer(copied, self.host.dtype)
        self.detached = True
        live.drop(self)

    @property
    def iterations_done(self) -> int:
        """Iterations that have ended since the launch, as the host sees them."""
        return int(self.host["done"][0])

    def running(self) -> bool:
        if self.detached or self.forked:
            return False
        try:
            on_device = not self._launch.done()
        except BaseError:
            live.drop(self)
            raise
        if not on_device:
            live.drop(self)
        return on_device

    def release(self, target: int) -> None:
        """Persistent mode: lets the loop run until `target` iterations are done."""
        self.host["target"] = target

    def quit(self) -> None:
        """Persistent mode: ends the loop once it is idle."""
        self._asked_to_quit = True
        if not self.forked:
            self.host["quit"] = 1

    @property
    def left_idle(self) -> bool:
        """Persistent mode: True if the kernel has left because the host released no iterations for
        a while.
        """
        return not self.running() and int(self.host["quit"][0]) == 1 and not self._asked_to_quit

    def abort(self) -> None:
        """Sets the abort word: the kernel leaves at the next iteration or wait."""
        if not self.forked:
            self.host["abort"] = 1

    def check(self) -> None:
        """Raises the error of a failed peer, or GpuError if a wait has given up."""
        ranks = self._ranks
        if ranks is not None and not self._failed:
            message = ranks.failure()
            if message is not None:
                self._failed = True
                self.abort()
                self._launch.wait(self._budget_s + 5.0)
                raise GpuError(message)
        if self._failed:
            return
        if self._trouble is not None and self._trouble():
            self._give_up(f"the host's proxy stopped: {self._trouble()}")
        if int(self.host["error"][0]) != 0:
            self._give_up("")

    def _give_up(self, text: str) -> None:
        """Waits for the kernel to leave and reports to the other ranks; raises GpuError."""
        self._failed = True
        self._launch.wait(self._budget_s + 5.0)
        text = text or self._explain(self.host[0])
        if self._ranks is not None:
            with contextlib.suppress(Exception):
                self._ranks.abort(text)
        raise GpuError(text)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the kernel to end; False if the time is up first. Raises GpuError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not (self.forked or self._launch.wait(0.05)):
            self.check()
            if end is not None and time.monotonic() > end:
                return False
        live.drop(self)
        self.check()
        return True

    def wait_done(self, iterations: int, timeout_s: float | None = None) -> bool:
        """Waits until a number of iterations is done or the kernel has ended. Raises GpuError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        pause = 1e-5
        while self.iterations_done < iterations and self.running():
            self.check()
            if end is not None and time.monotonic() > end:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 2e-3)
        self.check()
        return self.iterations_done >= iterations

    def check_complete(self) -> None:
        """Raises GpuError if the kernel has ended before its requested iterations."""
        if self.iterations_done < self.iterations:
            raise GpuError(
                f"the kernel ended after {self.iterations_done} of {self.iterations} iterations "
                "without an error; launch again, and report it if it happens again"
            )

    def stop(self, timeout_s: float | None = None) -> bool:
        """Aborts the kernel and waits for it, by default STOP_S; False if it has not left by
        then.
        """
        with contextlib.suppress(BaseError):  # a faulted device runs nothing any more
            if self.running():
                self.abort()
                self._launch.wait(STOP_S if timeout_s is None else timeout_s)
            return not self.running()
        return True

    def elapsed_ms(self) -> float:
        """Milliseconds the kernel was on the device."""
        return self._launch.elapsed_ms()
