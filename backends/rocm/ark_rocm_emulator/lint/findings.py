"""The value that every lint rule returns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One fault: the rule, where it is (``line`` counts from 1, 0 = whole kernel) and why."""

    rule: str
    function: str
    line: int
    text: str
    message: str

    def __str__(self) -> str:
        place = f"{self.function}:{self.line}" if self.line else self.function
        code = f"\n    {self.text}" if self.text else ""
        return f"{place}: [{self.rule}] {self.message}{code}"
