"""A launch in progress. It can be watched, allowed to run further iterations, aborted, and asked to
explain an error.

Created by `Executor.start`. Called by ark.runtime.runtime, ark.models.generate and ark.cli.measure.
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


# The most seconds for which `stop` waits for an aborted kernel to leave the device. The kernel
# reads the abort word in every wait.
STOP_S = 10.0


class Run:
    """A launch in progress.

    host: the launch's ArkHost structure, as an array of one element. iterations: the number of
    iterations of the launch. ranks: the job's ranks, if there are several. budget_s: the most
    seconds of a wait on the device. explain: makes an error message from the record in `host`.
    trouble: returns the error that stopped the proxy, or an empty text.
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
        """Copies the launch's ArkHost structure (the words by which kernel and host communicate)
        into other memory, because the original will be freed.
        """
        copied = bytearray(self.host.tobytes())  # copies all bytes; numpy would copy field by field
        self.host = np.frombuffer(copied, self.host.dtype)
        self.detached = True
        live.drop(self)

    @property
    def iterations_done(self) -> int:
        """The number of iterations that have ended since the launch, as far as the host knows."""
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
        """In persistent mode: lets the loop run until it has done `target` iterations in total."""
        self.host["target"] = target

    def quit(self) -> None:
        """In persistent mode: ends the loop once it has no iterations to run."""
        self._asked_to_quit = True
        if not self.forked:
            self.host["quit"] = 1

    @property
    def left_idle(self) -> bool:
        """True if a persistent kernel has left the device because the host released no iterations
        for some time.
        """
        return not self.running() and int(self.host["quit"][0]) == 1 and not self._asked_to_quit

    def abort(self) -> None:
        """Aborts the launch: sets a word that the kernel reads in each iteration and in each wait,
        whereupon it ends.
        """
        if not self.forked:
            self.host["abort"] = 1

    def check(self) -> None:
        """Raises the error of a failed peer, or GpuError if a wait on the device has timed out."""
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
        """Waits for the kernel to leave, reports the failure to the other ranks, and raises
        GpuError.
        """
        self._failed = True
        self._launch.wait(self._budget_s + 5.0)
        text = text or self._explain(self.host[0])
        if self._ranks is not None:
            with contextlib.suppress(Exception):
                self._ranks.abort(text)
        raise GpuError(text)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the kernel to end. Returns False if the time is up first. Raises GpuError if it
        failed.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not (self.forked or self._launch.wait(0.05)):
            self.check()
            if end is not None and time.monotonic() > end:
                return False
        live.drop(self)
        self.check()
        return True

    def wait_done(self, iterations: int, timeout_s: float | None = None) -> bool:
        """Waits until this number of iterations is done or the kernel has ended. Raises GpuError if
        it failed.
        """
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
        """Raises GpuError if the kernel has ended before it has run all requested iterations."""
        if self.iterations_done < self.iterations:
            raise GpuError(
                f"the kernel ended after {self.iterations_done} of {self.iterations} iterations "
                "without an error; launch again, and report it if it happens again"
            )

    def stop(self, timeout_s: float | None = None) -> bool:
        """Aborts the kernel and waits for it, by default for STOP_S. Returns False if it has not
        left by then.
        """
        with contextlib.suppress(BaseError):  # a device with a fault runs nothing
            if self.running():
                self.abort()
                self._launch.wait(STOP_S if timeout_s is None else timeout_s)
            return not self.running()
        return True

    def elapsed_ms(self) -> float:
        """Milliseconds for which the kernel was on the device."""
        return self._launch.elapsed_ms()
