"""docs/custom-ops.md followed literally: its op runs, and its result equals its reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/custom-ops.md"


@pytest.mark.emulated("slow")
def test_the_program_of_the_page(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().split("## An op, step by step")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.S)
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert float(capsys.readouterr().out) <= 1e-6
    assert scope["scale"].reference(2.0, 3.0, 4.0) == 24.0
