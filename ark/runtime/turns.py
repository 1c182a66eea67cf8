"""Methods that threads call one after the other. Called by ark.runtime.runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def in_turn(method: F) -> F:
    """The method of an object whose `_turn` is a lock that a thread may take again."""

    @functools.wraps(method)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            return method(self, *args, **kwargs)

    return cast(F, apply)
