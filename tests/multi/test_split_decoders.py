"""`ark generate --split NAME`: a decoder that is split among ranks by the program NAME of
`ark.parallel` (op_trans) gives the tokens of one device.

Both the prompt phase and the decoding phase are split, with the caches that they share.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases.decoders import CASES as DECODERS
from tests.cases.generate_ranks import NOAH, answer
from tests.checkpoints import make_checkpoint
from tests.slow import slow

CASES = {**DECODERS, "mixtral-of-four": {**DECODERS["mixtral"], "num_local_experts": 4}}
COMMON = ("--backend", "cpu", "--max-new-tokens", "16", "--context", "96")


@pytest.mark.parametrize(
    "split", ["megatron", *(pytest.param(s, marks=slow) for s in ("sequence", "auto"))]
)
def test_shipped_model(split: str) -> None:
    assert answer(NOAH, *COMMON, "--ranks", "2", "--split", split) == answer(NOAH, *COMMON)


@pytest.mark.parametrize(
    ("case", "ranks", "split"),
    [
        ("mixtral-of-four", "2", "expert"),
        pytest.param("mixtral-of-four", "4", "expert", marks=slow),
        pytest.param("qwen3-tied-wide-heads", "2", "row", marks=slow),
    ],
)
def test_other_decoders(case: str, ranks: str, split: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / case, **CASES[case])
    want = answer(directory, *COMMON)
    assert answer(directory, *COMMON, "--ranks", ranks, "--split", split) == want


def test_unknown_plan_name_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="the plan 'nothing' does not exist"):
        answer(NOAH, *COMMON, "--ranks", "2", "--split", "nothing")
