"""docs/architecture.md followed to the letter: its new op runs, and is what NumPy says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.gradients import derivatives
from ark.lower import registry
from ark.ops import elementwise
from ark.tasks import functions
from tests import gradcheck
from tests.opcheck import Case, check

PAGE = Path(__file__).resolve().parents[3] / "docs/architecture.md"


def test_the_op_of_the_page_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().split("## A new op")[1].split("\n## ")[0]
    line, function, meaning, derivative, by_torch = re.findall(
        r"```python\n(.*?)```", section, re.S
    )
    (entry,) = eval(f"({line.splitlines()[-1].strip()})", vars(functions))  # it ends with a comma
    monkeypatch.setitem(functions.FUNCTIONS, entry.name, entry)
    # What the module does for each line of the table when it is imported.
    made = registry.OpDef(
        entry.name, elementwise._reference(entry.name), elementwise._lower, aliasing="exact"
    )
    monkeypatch.setitem(registry._OPS, entry.name, made)
    scope: dict[str, Any] = dict(vars(elementwise))
    exec(function, scope)
    unary = eval("{" + meaning.strip() + "}", {"np": np})
    for name, trees in eval("{" + derivative.strip() + "}", vars(derivatives)).items():
        monkeypatch.setitem(derivatives.DERIVATIVES, name, trees)
    ark.init(backend="cpu")
    array = np.random.default_rng(0).uniform(-3, 3, (3, 37))
    check(
        [
            Case(f"{entry.name} {t}", [(array, t)], scope[entry.name], unary[entry.name])
            for t in (ark.fp32, ark.fp16, ark.bf16)
        ]
    )
    ark.init(backend="cpu")
    torch = pytest.importorskip("torch")
    right, low, high = eval("{" + by_torch.strip() + "}", {"F": torch.nn.functional})[entry.name]
    array = gradcheck.values(3, 5, low=low, high=high)
    gradcheck.check([gradcheck.Case(entry.name, [array], scope[entry.name], right)])
