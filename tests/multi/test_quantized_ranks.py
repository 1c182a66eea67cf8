"""Ranks split quantised weights at group boundaries: the tokens equal those of one rank."""

from __future__ import annotations

from pathlib import Path

from tests.cases.generate_ranks import NOAH, answer, start
from tests.cases.quantized import mxfp4_checkpoint, quantised_checkpoint
from tests.cases.quantized_words import awq, gptq
from tests.slow import slow

COMMON = ("--backend", "cpu", "--max-new-tokens", "16")


def check(directory: Path, *words: str) -> None:
    one, two = (answer(directory, *COMMON, *words, "--ranks", str(n))["tokens"] for n in (1, 2))
    assert one == two and len(set(one)) > 3


@slow
def test_noah_of_4_bits() -> None:
    check(NOAH, "--quantize", "int4")


def test_awq_with_groups_that_ranks_divide(tmp_path: Path) -> None:
    """AWQ on two ranks: a rank's 48 inputs of attention's output are one and a half groups of 32,
    so groups are divided into groups of 16.
    """
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    check(quantised_checkpoint(tmp_path, awq, config)[1])


def test_act_order_is_refused(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}
    directory = quantised_checkpoint(tmp_path, gptq(4, True, True), config)[1]
    process = start(directory, "--backend", "cpu", "--ranks", "2")
    _, message = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "act-order" in message and "Traceback" not in message


def test_mxfp4_experts_whose_biases_ranks_add_in_parts(tmp_path: Path) -> None:
    """gpt-oss on two ranks: each rank has the sinks and biases of its heads, and adds half of the
    biases that are summed.
    """
    check(mxfp4_checkpoint(tmp_path)[1])
