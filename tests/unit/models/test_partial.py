"""Partial results of attention and feed-forward parts that the ranks add. Other ops on them are
refused.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import ark
from ark.cli import main
from ark.models import registry
from ark.models.llama import Attention, FeedForward, Layer, Llama
from tests.cases.decoders import CASES
from tests.checkpoints import make_checkpoint

BIAS = "layers.{}.attention.bias"
Change = Callable[[Any, ark.Tensor], ark.Tensor]
CHANGES: dict[str, Change] = {
    "a parameter that every rank holds whole": lambda m, y: ark.add(y, m.bias),
    "relu ": lambda m, y: ark.relu(y),
    "": lambda m, y: ark.add(y, ark.mul(m.bias, 0.5)),  # each of two ranks adds half
    "mul ": lambda m, y: ark.add(y, ark.mul(m.bias, 0.25)),
}


def decoder(change: Change) -> type[Llama]:
    """Returns a Llama whose attention applies `change` to its result."""

    class Changed(Attention):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.bias = ark.parameter((self.output.shape()[0],), ark.fp32)

        def forward(self, *arguments: Any) -> ark.Tensor:
            return change(self, super().forward(*arguments))

    class OwnDecoder(Llama):
        # The bias is read from a stored norm, which has the same shape.
        WEIGHTS: ClassVar[dict[str, str]] = {
            **Llama.WEIGHTS,
            BIAS: Llama.WEIGHTS["layers.{}.attention_norm"],
        }

        def layer(self, c: Any, dtype: Any, number: int) -> Layer:
            return Layer(c, dtype, Changed(c, dtype, number), FeedForward(c, dtype))

    return OwnDecoder


def planned(directory: Path, folder: Path) -> int:
    words = ["--machine", "cpu-2", "--ranks", "2", "--context", "32", "--chunk", "0"]
    return main(["plan", str(directory), *words, "-o", str(folder / "plan.json")])


@pytest.mark.parametrize("fault", CHANGES)
def test_result_that_ranks_cannot_add_is_refused(
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(registry.ARCHITECTURES, "LlamaForCausalLM", decoder(CHANGES[fault]))
    code = planned(make_checkpoint(tmp_path / "own"), tmp_path)
    message = " ".join(capsys.readouterr().err.split())
    assert code == (2 if fault else 0), message
    if fault:
        assert "Changed.forward is added over 2 ranks" in message and fault in message


@pytest.mark.parametrize("case", ["gpt-oss", "deepseek-v3", "mixtral"])
def test_decoders_of_ark_are_sums(case: str, tmp_path: Path) -> None:
    assert planned(make_checkpoint(tmp_path / case, **CASES[case]), tmp_path) == 0


def test_parameter_without_a_stored_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = decoder(CHANGES[""])
    own.WEIGHTS = Llama.WEIGHTS
    monkeypatch.setitem(registry.ARCHITECTURES, "LlamaForCausalLM", own)
    assert planned(make_checkpoint(tmp_path / "own"), tmp_path) == 2
    assert "WEIGHTS has no entry for its parameter" in " ".join(capsys.readouterr().err.split())
