"""Planning and verifying make many objects at once, and no cycles of them: Python's cyclic garbage
collector would walk them all again and again (a third of the time) and find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Within it, and within a function that it decorates, the cyclic collector does not run."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()
