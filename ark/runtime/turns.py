"""A decorator for methods that only one thread at a time may execute. Called by
ark.runtime.runtime.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def in_turn(method: F) -> F:
    """Wraps a method so that a call holds the object's reentrant lock `_turn` while it runs."""

    @functools.wraps(method)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast(F, apply)
