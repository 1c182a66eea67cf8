"""docs/custom-ops.md followed literally: its op and its ring give NumPy's results."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs/custom-ops.md"


@pytest.mark.emulated("slow")
def test_program_of_the_page(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = PAGE.read_text().split("## An op, step by step")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.S)
    scope: dict[str, Any] = {}
    exec(program, scope)
    assert float(capsys.readouterr().out) <= 1e-6
    assert scope["scale"].reference(2.0, 3.0, 4.0) == 24.0


RING = """


def work():
    import numpy as np

    ark.init(backend="cpu")
    rank, world = ark.Model.get_rank(), ark.Model.get_world_size()
    x = ark.tensor([3000])
    averaged = mean(x, rank, world)
    with ark.Runtime() as runtime:
        runtime.launch()
        x.from_numpy(np.arange(3000, dtype=np.float32) + rank)
        runtime.barrier()
        runtime.run(2)
        np.testing.assert_allclose(averaged.to_numpy(), np.arange(3000) + 1, rtol=1e-6)
        runtime.barrier()


if __name__ == "__main__":
    raise SystemExit(ark.launch(3, work))
"""


def test_ring_of_the_page_on_three_ranks(tmp_path: Path) -> None:
    section = PAGE.read_text().split("## Channels: tasks that communicate")[1].split("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.S)
    script = tmp_path / "ring.py"
    script.write_text(program + RING)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
