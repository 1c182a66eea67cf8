"""docs/custom-ops.md followed to the letter: its op runs, and is what its reference says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark

PAGE = Path(__file__).resolve().parents[2] / "docs/custom-ops.md"


@pytest.mark.emulated("slow")
def test_the_op_of_the_page(backend: str) -> None:
    section = PAGE.read_text().split("## An op, step by step")[1].split("\n## ")[0]
    scope: dict[str, Any] = {"ark": ark}
    for block in re.findall(r"```python\n(.*?)```", section, re.S):
        exec(block, scope)
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(n).astype(np.float32) for n in ((10, 33), 33))
    with ark.Runtime() as runtime:
        runtime.launch()
        scope["x"].from_numpy(x)
        scope["w"].from_numpy(w)
        runtime.run()
        want = np.maximum(scope["scale"].reference(x, w, 3.0), 0)
        np.testing.assert_allclose(scope["y"].to_numpy(), want, rtol=1e-6)
