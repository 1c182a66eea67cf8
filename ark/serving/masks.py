"""Computes the token masks of requests with grammars on a separate thread while the device runs.
The thread of ark.serving.engine asks for masks and takes the results.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ark.backend import threads
from ark.errors import InvalidUsageError
from ark.models.options import bias_of
from ark.serving.progress import Progress
from ark.tasks.adjusted import MASK_BITS

Answered = tuple[Progress, np.ndarray | None, str]
"""A request, its mask (None if its text has ended), and the reason why it cannot go on (or "")."""


class MaskMaker:
    """Computes masks in the order in which they are asked for. news: called after each mask."""

    def __init__(self, news: Callable[[], None]) -> None:
        self._news = news
        self._asked: queue.SimpleQueue[tuple[Progress, tuple[int, ...]] | None]
        self._asked = queue.SimpleQueue()
        self._made: deque[Answered] = deque()
        self._thread: threading.Thread | None = None
        self.pending = 0
        """The number of masks that were asked for and not taken yet."""

    @property
    def ready(self) -> bool:
        """True if a computed mask has not been taken yet."""
        return bool(self._made)

    @property
    def all_ready(self) -> bool:
        """True if every mask that was asked for has been computed."""
        return len(self._made) == self.pending

    def ask(self, progress: Progress, tokens: Sequence[int] = ()) -> None:
        """Asks for the mask of the token after `tokens`, which a request with a grammar has just
        received.
        """
        progress.mask = None
        self.pending += 1
        self._asked.put((progress, tuple(tokens)))
        if self._thread is None:
            self._thread = threads.start(self._work, name="ark-masks")

    def take(self) -> list[Answered]:
        """The results since the last call."""
        answers = []
        while self._made:
            answers.append(self._made.popleft())
        self.pending -= len(answers)
        return answers

    def close(self) -> None:
        """Ends the thread."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            progress, tokens = asked
            self._made.append((progress, *_mask(progress, tokens)))
            self._news()


def _mask(progress: Progress, tokens: Sequence[int]) -> tuple[np.ndarray | None, str]:
    """The mask, with a bit set for each token that may follow. It is packed on this thread because
    a step cannot wait for it.
    """
    assert progress.guide is not None
    sampling = progress.request.sampling
    try:
        allowed = progress.guide.advance(tokens)
    except Exception as error:  # ends this request alone
        cause = str(error) if isinstance(error, InvalidUsageError) else repr(error)[:300]
        return None, cause
    if allowed is None:
        return None, ""
    bias = bias_of(sampling, allowed.size)
    if not (allowed if bias is None else allowed & (bias > -np.inf)).any():
        return None, "no token is left that the text's form and suppress_tokens both allow"
    padded = np.zeros(-(-allowed.size // MASK_BITS) * MASK_BITS, bool)
    padded[: allowed.size] = allowed
    return np.packbits(padded, bitorder="little").view(np.int32), ""
