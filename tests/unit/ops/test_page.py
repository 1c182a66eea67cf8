"""docs/new-elementwise-op.md followed to the letter: its one entry is a whole op."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/new-elementwise-op.md").read_text()
TABLE = "ark/tasks/functions.py"
PROGRAM = """
import importlib.util, sys
from importlib.abc import MetaPathFinder

class Edited(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ark.tasks.functions":
            return importlib.util.spec_from_file_location(name, sys.argv[1])

sys.meta_path.insert(0, Edited())
import numpy as np, torch
import ark
from tests import gradcheck
from tests.opcheck import Case, check

ark.init(backend="cpu")
array = np.random.default_rng(0).uniform(-3, 3, (3, 37))
check([Case(t.name, [(array, t)], ark.exp2, np.exp2) for t in (ark.fp32, ark.fp16, ark.bf16)])
gradcheck.check([gradcheck.Case("exp2", [gradcheck.values(3, 5)], ark.exp2, torch.exp2)])

class Doubled(torch.nn.Module):
    def forward(self, x):
        return torch.exp2(x) * 2

from ark.interop.torch.elementwise import _UNARY
assert _UNARY["exp2"] is ark.exp2
x = torch.tensor([-1.0, 0.0, 2.0])
np.testing.assert_allclose(ark.from_torch(Doubled(), (x,))(x).numpy(), [1, 2, 8], rtol=1e-6)
assert ark.exp2.__doc__.startswith("2^input, elementwise") and "exp2" in ark.__all__
"""


def test_the_entry_of_the_page_is_a_whole_op(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    text = (ROOT / TABLE).read_text()
    begin, entry = block.split("        ...\n")
    assert text.count(begin) == 1 and '"exp2"' not in text
    edited = tmp_path / "functions.py"
    edited.write_text(text.replace(begin, begin + entry))
    command = [sys.executable, "-c", PROGRAM, str(edited)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_names_one_file() -> None:
    first = PAGE.split("\n\n")[1]
    assert first.startswith(f"1 file: `{TABLE}`.")
