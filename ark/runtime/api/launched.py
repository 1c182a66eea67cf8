"""The class by which users of ARK (microsoft/ark) get the plan that was launched last:
Executor.get().plan(). It does not execute plans.

ark's own executor is ark.runtime.executor.
"""

from __future__ import annotations

from ark.runtime.runtime import Runtime


class Executor:
    """A class with a single object, as in ARK (microsoft/ark)."""

    @staticmethod
    def get() -> Executor:
        """The only object of this class."""
        return Executor()

    @staticmethod
    def reset() -> None:
        """Stops all runtimes and forgets the last plan."""
        Runtime.stop_all()
        Runtime.last_plan = None

    def plan(self) -> str:
        """The plan that was launched last, as JSON; empty if there is none."""
        return str(Runtime.last_plan) if Runtime.last_plan else ""
