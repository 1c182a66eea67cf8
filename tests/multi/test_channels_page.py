"""docs/channels.md followed literally: its blocks form one script, which runs in a folder of its
own.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ark
from tests.pages import python_blocks

PAGE = Path(__file__).resolve().parents[2] / "docs/channels.md"


def test_script_of_the_page(tmp_path: Path) -> None:
    section = PAGE.read_text().split("## Channels in a model")[1].split("\n## ")[0]
    (script,) = re.findall(r"```python\n(.*?)```", section, re.S)
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


JOINED = """
import torch

BLOCK
assert torch.distributed.get_backend() == "ark"
x = torch.full((4099,), 1.0 + torch.distributed.get_rank())
torch.distributed.all_reduce(x)
assert (x == 3).all()
torch.distributed.destroy_process_group()
"""


def test_backend_of_torch_on_the_page(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (block,) = (b for b in python_blocks("channels.md") if "ark.distributed.torch" in b)
    script = tmp_path / "script.py"
    script.write_text(JOINED.replace("BLOCK\n", block))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, script], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_host_cannot_read_symmetric_memory() -> None:
    """Memory that peers write cannot be accessed by the host: a symmetric tensor, and the view of
    it that `wait` returns, can be neither read nor written from Python.
    """
    ark.Model.reset()
    ark.Model.set_rank(1)
    ark.Model.set_world_size(2)
    received = ark.comm.symmetric([16])
    (arrived,) = ark.comm.channel(0).wait(received)
    doubled = ark.mul(arrived, 2.0)
    planner = ark.planner.Planner()
    planner.machine = ark.backend.registry.machine("cpu-2")
    inner = planner.plan().inner
    assert inner is not None
    arenas = {b.name.split(".")[0]: b.arena for b in inner.buffers}
    assert arenas["symmetric"] == "symmetric" and "external" in arenas.values()
    for tensor in (received, arrived):
        with pytest.raises(ark.InvalidUsageError, match="symmetric memory"):
            tensor.to_numpy()
        with pytest.raises(ark.InvalidUsageError, match="symmetric memory"):
            tensor.from_numpy(doubled.shape()[0] * [0.0])
    ark.Model.reset()
