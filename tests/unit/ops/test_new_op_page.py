"""docs/new-elementwise-op.md followed literally: its one entry defines a complete op."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import edited, pages

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/new-elementwise-op.md").read_text()
TABLE = "ark/tasks/functions.py"
PROGRAM = """
import numpy as np, torch
import ark
from tests import gradcheck
from tests.opcheck import Case, check

ark.init(backend="cpu")
array = np.random.default_rng(0).uniform(-3, 3, (3, 37))
check([Case(t.name, [(array, t)], ark.exp2, np.exp2) for t in (ark.fp32, ark.fp16, ark.bf16)])
gradcheck.check([gradcheck.Case("exp2", [gradcheck.values(3, 5)], ark.exp2, torch.exp2)])

two = [(np.random.default_rng(n).uniform(-3, 3, (3, 37)), ark.fp32) for n in (0, 1)]
check([Case("reglu", two, ark.reglu, lambda a, b: np.maximum(a, 0) * b)])
gated = [gradcheck.values(3, 5), gradcheck.values(3, 5, low=0.5, high=2.0)]
relu = torch.nn.functional.relu
gradcheck.check([gradcheck.Case("reglu", gated, ark.reglu, lambda a, b: relu(a) * b)])
assert ark.reglu.__doc__.startswith("relu(gate) * up; fp32") and "reglu" in ark.__all__

class Doubled(torch.nn.Module):
    def forward(self, x):
        return torch.exp2(x) * 2

from ark.interop.torch.elementwise import _UNARY
assert _UNARY["exp2"] is ark.exp2
x = torch.tensor([-1.0, 0.0, 2.0])
np.testing.assert_allclose(ark.from_torch(Doubled(), (x,))(x).numpy(), [1, 2, 8], rtol=1e-6)
assert ark.exp2.__doc__.startswith("2^input, elementwise") and "exp2" in ark.__all__
"""


def test_entry_of_the_page_is_a_whole_op(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    text = (ROOT / TABLE).read_text()
    assert '"exp2"' not in text and '"reglu"' not in text
    for block in pages.python_blocks("new-elementwise-op.md"):
        begin, entry = block.split("        ...\n")
        assert text.count(begin) == 1
        text = text.replace(begin, begin + entry)
    edited.run(tmp_path, {"ark.tasks.functions": text}, PROGRAM)


def test_page_names_one_file() -> None:
    first = PAGE.split("\n\n")[1].replace("\n", " ")
    assert f"1 file: `{TABLE}`." in first
