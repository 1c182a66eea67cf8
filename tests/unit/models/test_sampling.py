"""Every field of SamplingParams: values at its bounds, beyond them and of other types."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest

from ark.errors import InvalidUsageError
from ark.models.sampling import DEFAULT, GREEDY, SamplingParams, seeded_alike
from ark.models.structured import StructuredOutputsParams

NAN, INF = float("nan"), float("inf")
ACCEPTED: dict[str, list[Any]] = {
    "n": [1, 128],
    "temperature": [0, 0.0, 1e-5, 0.7, 2, 1e5],
    "top_k": [0, 1, 2**31 - 1],
    "top_p": [1e-37, 0.5, 1],
    "min_p": [0, 0.5, 1],
    "typical_p": [1e-37, 0.5, 1],
    "repetition_penalty": [1e-3, 1, 1.3, 1000],
    "presence_penalty": [-2, 0, 2.0],
    "frequency_penalty": [-2, 0, 2.0],
    "logit_bias": [{}, {0: -100, 5: 100.0}],
    "seed": [None, 0, -(2**63), 2**64 - 1],
    "max_tokens": [None, 1, 2**31 - 1],
    "min_tokens": [0, 16],
    "stop": [(), ("a", "bc")],
    "stop_token_ids": [(), (0, 2**31 - 1), tuple(range(1000))],
    "ignore_eos": [True, False],
    "logprobs": [None, 0, 20],
    "suppress_tokens": [(), (0, 2**31 - 1)],
    "structured_outputs": [None, StructuredOutputsParams(regex="a")],
}
REFUSED: dict[str, list[Any]] = {
    "n": [0, 129, True, None, 1.5],
    "temperature": [1e-6, 1e39, -1, True, None],
    "top_k": [-2, 2**31, 1.5, None, True],
    "top_p": [0, 1e-46, 1.01, -0.5, None, True],
    "min_p": [-0.1, 1.01, None],
    "typical_p": [0, 1e-46, 1.01, None],
    "repetition_penalty": [0, -1, 1e4, None],
    "presence_penalty": [-2.01, 2.01, None],
    "frequency_penalty": [-2.01, 2.01, None],
    "logit_bias": [None, {-1: 0.0}, {2**31: 0.0}, {1: 100.5}, {1: NAN}, {1: "x"}, {"x": 1.0}],
    "seed": [-(2**63) - 1, 2**64, 0.5, True],
    "max_tokens": [0, -1, 2**31, 1.5],
    "min_tokens": [-1, 17, 1.5, None],
    "stop": [None, ("",), "", (1,), 3],
    "stop_token_ids": [None, (-1,), (2**31,), (0.5,), "12", 7],
    "ignore_eos": [0, 1, None],
    "logprobs": [-1, 21, 1.5, True],
    "suppress_tokens": [None, (-1,), 5],
    "structured_outputs": [5, {}, {"jsn": 1}, {"regex": ""}, {"regex": "a", "json_object": True}],
}
FIELDS = list(inspect.signature(SamplingParams).parameters)
NEVER: list[Any] = [object(), b"x", [[0.5]], NAN, INF]


@pytest.mark.parametrize("name", FIELDS)
def test_field_has_its_range(name: str) -> None:
    for value in ACCEPTED[name]:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in REFUSED[name] + NEVER:
        with pytest.raises(InvalidUsageError, match=name) as error:
            SamplingParams(**{name: value})
            pytest.fail(f"{name}={value!r} was accepted")
        if "whole number" not in str(error.value):
            assert (
                "must be" in str(error.value)
                or "must map" in str(error.value)
                or ("raise max_tokens" in str(error.value))
            )


def test_other_spellings_of_a_value() -> None:
    """Values that vLLM accepts are accepted: top_k=-1 means no top-k, and a string is a list of one
    string.
    """
    assert SamplingParams(top_k=-1) == DEFAULT
    assert SamplingParams(stop="end") == SamplingParams(stop=["end"])  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[2, 1]).stop_token_ids == (2, 1)  # type: ignore[arg-type]


def test_seed_is_drawn_where_none_is_given() -> None:
    drawn = {SamplingParams().seeded().seed for _ in range(20)}
    assert len(drawn) == 20
    assert None not in drawn
    assert SamplingParams(seed=5).seeded(7).seed == 5
    assert seeded_alike(GREEDY, None).seed == 0


def test_ranks_draw_by_the_seed_of_the_first() -> None:
    class Ranks:
        def all_gather(self, data: bytes) -> list[bytes]:
            return [b"12345", data]

    assert seeded_alike(SamplingParams(), Ranks()).seed == 12345
    assert seeded_alike(SamplingParams(seed=5), Ranks()).seed == 5


def test_fields_that_a_plan_may_not_follow() -> None:
    basic = ("temperature", "top_k")
    assert SamplingParams(temperature=0.5, top_k=3, n=2, stop="x", seed=4).beyond(basic) == ()
    changed = SamplingParams(top_p=0.9, logit_bias={1: 2.0}, logprobs=0)
    assert changed.beyond(basic) == ("top_p", "logit_bias", "logprobs")


def test_each_field_is_checked() -> None:
    assert set(FIELDS) == set(ACCEPTED) == set(REFUSED)
    assert [f.name for f in dataclasses.fields(SamplingParams)] == FIELDS


def test_importing_ark_does_not_load_models() -> None:
    """ark.LLM and ark.SamplingParams are loaded on first use."""
    code = (
        "import sys, ark\n"
        "loaded = [m for m in sys.modules if m.startswith(('ark.serving', 'ark.models'))]\n"
        "assert not loaded, loaded\n"
        "assert ark.SamplingParams.__module__ == 'ark.models.sampling'\n"
        "assert ark.LLM.__module__ == 'ark.serving.llm'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
