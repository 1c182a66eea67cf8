"""A launch in progress: watched, released iteration by iteration, aborted, explained.

Made by `Executor.start`. Called by ark.api.runtime, ark.models.generate and ark.bench.
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
    """What a launch needs of the bootstrap: see ark.runtime.bootstrap."""

    def all_gather(self, data: bytes) -> list[bytes]: ...

    def barrier(self, label: str = "barrier") -> None: ...

    def check_same(self, label: str, digest: str) -> None: ...

    def failure(self) -> str | None: ...

    def abort(self, message: str) -> None: ...


# How long a kernel that was told to leave may take. It asks once an iteration and in every wait.
STOP_S = 10.0


class Run:
    """A launch in progress.

    host: the ArkHost that it tells, an array of one. iterations: what it was launched for. ranks:
    the job's ranks, for several. budget_s: a device-side wait's budget. explain: makes the error's
    text from the host block's record. trouble: what stopped the proxy, if anything did.
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
        """Keeps what the host block says: the launch has ended and its memory will be freed."""
        said = bytearray(self.host.tobytes())  # an array's own copy goes field by field
        self.host = np.frombuffer(said, self.host.dtype)
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
        """Persistent mode: lets the loop end once it is idle."""
        self._asked_to_quit = True
        if not self.forked:
            self.host["quit"] = 1

    @property
    def left_idle(self) -> bool:
        """Persistent mode: has the kernel left by itself because the host was silent?"""
        return not self.running() and int(self.host["quit"][0]) == 1 and not self._asked_to_quit

    def abort(self) -> None:
        """Raises the abort word: the kernel leaves at the next iteration or wait."""
        if not self.forked:
            self.host["abort"] = 1

    def check(self) -> None:
        """Passes on a peer's failure; raises GpuError if a wait has given up."""
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
        """Waits for the kernel to leave and tells the other ranks; raises GpuError."""
        self._failed = True
        self._launch.wait(self._budget_s + 5.0)
        text = text or self._explain(self.host[0])
        if self._ranks is not None:
            with contextlib.suppress(Exception):
                self._ranks.abort(text)
        raise GpuError(text)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the kernel to end; False if the time ran out first. Raises GpuError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not (self.forked or self._launch.wait(0.05)):
            self.check()
            if end is not None and time.monotonic() > end:
                return False
        live.drop(self)
        self.check()
        return True

    def wait_done(self, iterations: int, timeout_s: float | None = None) -> bool:
        """Waits until so many iterations are done (or the kernel has ended). Raises GpuError."""
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
        """Raises GpuError if the kernel has ended before the iterations that it was started for."""
        if self.iterations_done < self.iterations:
            raise GpuError(
                f"the kernel ended after {self.iterations_done} of {self.iterations} iterations "
                "and gave no reason; launch again, and report it if it ends early again"
            )

    def stop(self, timeout_s: float | None = None) -> bool:
        """Tells the kernel to leave and waits, by default STOP_S; False if it is still there."""
        with contextlib.suppress(BaseError):  # a device that faulted runs nothing any more
            if self.running():
                self.abort()
                self._launch.wait(STOP_S if timeout_s is None else timeout_s)
            return not self.running()
        return True

    def elapsed_ms(self) -> float:
        """Milliseconds the kernel was on the device."""
        return self._launch.elapsed_ms()
