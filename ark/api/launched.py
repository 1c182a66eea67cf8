"""ARK's view of what was launched last: Executor.get().plan().

The real one is ark.runtime.executor.
"""

from __future__ import annotations

from ark.runtime.runtime import Runtime


class Executor:
    """A singleton, as in ARK."""

    @staticmethod
    def get() -> Executor:
        """The one object of this class."""
        return Executor()

    @staticmethod
    def reset() -> None:
        """Stops everything and forgets the last plan."""
        Runtime.stop_all()
        Runtime.last_plan = None

    def plan(self) -> str:
        """The plan that was launched last, as JSON; empty if none was."""
        return str(Runtime.last_plan) if Runtime.last_plan else ""
