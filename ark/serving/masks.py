"""Computes token masks on a separate thread while the device runs. A mask states which tokens may
come next. Requests with a grammar need a new mask for each token. The thread of ark.serving.engine
asks for masks and takes the results.
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
"""A request, its mask (None if its text is complete), and the reason why it cannot continue ("" if
it can).
"""


class MaskMaker:
    """Computes token masks in the order in which they are requested. news: a function that is
    called after each mask.
    """

    def __init__(self, news: Callable[[], None]) -> None:
        self._news = news
        self._asked: queue.SimpleQueue[tuple[Progress, tuple[int, ...]] | None]
        self._asked = queue.SimpleQueue()
        self._masks: deque[Answered] = deque()
        self._thread: threading.Thread | None = None
        self.pending = 0
        """The number of masks that were requested and not yet taken."""

    @property
    def ready(self) -> bool:
        """True if a computed mask has not been taken yet."""
        return bool(self._masks)

    @property
    def all_ready(self) -> bool:
        """True if all masks that were requested have been computed."""
        return len(self._masks) == self.pending

    def ask(self, progress: Progress, tokens: Sequence[int] = ()) -> None:
        """Requests the mask for the next token. tokens: the tokens that the text has received since
        its last mask.
        """
        progress.mask = None
        self.pending += 1
        self._asked.put((progress, tuple(tokens)))
        if self._thread is None:
            self._thread = threads.start(self._work, name="ark-masks")

    def take(self) -> list[Answered]:
        """The masks computed since the last call."""
        answers = []
        while self._masks:
            answers.append(self._masks.popleft())
        self.pending -= len(answers)
        return answers

    def close(self) -> None:
        """Ends the thread."""
        self._asked.put(None)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            progress, tokens = asked
            self._masks.append((progress, *_mask(progress, tokens)))
            self._news()


def _mask(progress: Progress, tokens: Sequence[int]) -> tuple[np.ndarray | None, str]:
    """The mask, with a bit set for each token that may follow, packed into words. Packing is done
    on this thread, so that a step does not have to wait for it.
    """
    assert progress.guide is not None
    sampling = progress.request.sampling
    try:
        allowed = progress.guide.advance(tokens)
    except BaseException as error:  # ends only this request; a panic in Rust is no Exception
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
