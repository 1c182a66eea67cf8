"""`ark parallelize` and `ark plan` on scripts that give a torch module to ark, and sequences of
32,768 tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from ark.cli import main

WIDTH, ROWS, HEADS = 64, 32, 4
MODULE = f"""
import ark
import torch

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = torch.nn.Linear({WIDTH}, {3 * WIDTH}, bias=False)
        self.out = torch.nn.Linear({WIDTH}, {WIDTH}, bias=False)

    def forward(self, x):
        heads = self.parts(x).view(2, {ROWS}, 3, {HEADS}, -1).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(heads[0] @ heads[1].transpose(-1, -2), -1) @ heads[2]
        return x + self.out(mixed.transpose(1, 2).reshape(2, {ROWS}, {WIDTH}))

module, x = Attention(), torch.zeros(2, {ROWS}, {WIDTH})
"""
CALLS = {
    "from_torch": "ark.from_torch(module, (x,))(x)\n",
    "compile": "with torch.no_grad():\n    torch.compile(module, backend='ark')(x)\n",
}


@pytest.mark.parametrize("call", CALLS)
def test_torch_module_in_place_of_a_checkpoint(
    call: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The module's parameters, whose heads are views of another shape, count as parameters: data
    parallelism has all of them on each rank, a split by columns and rows half of them.
    """
    script = tmp_path / "module.py"
    script.write_text(MODULE + CALLS[call])
    words = ["parallelize", str(script), "--mesh", "2", "--machine", "h100", "--inference"]
    held = {}
    for plan in ("data", "column"):
        assert main([*words, "--plan", plan, "--json"]) == 0
        (memory,) = json.loads(capsys.readouterr().out)["memory"]
        held[plan] = memory["parameters"]
    assert held == {"data": 4 * 4 * WIDTH * WIDTH, "column": 2 * 4 * WIDTH * WIDTH}
    assert main(["plan", str(script), "--machine", "h100"]) == 0
    assert "matmul" in capsys.readouterr().out


def test_sequences_of_32768_tokens_are_split(capsys: pytest.CaptureFixture[str]) -> None:
    """A step of Llama 3.1 8B with 32,768 tokens does not fit 8 H200 under `megatron`, whose ranks
    repeat norms and residuals of all tokens, and fits under `sequence`.
    """
    words = ["parallelize", "llama-3.1-8b", "--mesh", "8", "--machine", "h200", "--batch", "1"]
    words += ["--sequence", "32768", "--json", "--plan"]
    assert main([*words, "megatron"]) == 2
    assert "use more ranks" in capsys.readouterr().err
    assert main([*words, "sequence"]) == 0
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["work"]["share"] == pytest.approx(1 / 8, rel=0.01)
    assert prediction["bytes"] < 100e9
