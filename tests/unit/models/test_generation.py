"""generation_config.json is read as transformers reads it; fields that ark does not support are
named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from ark.cli import main
from ark.errors import ModelError
from ark.models.generate import Generator
from ark.models.generation import (
    ASSISTED,
    BEAMS,
    READ,
    SAMPLED,
    WITHOUT_EFFECT,
    ignored,
    sampling_fields,
)
from ark.models.sampling import SamplingParams
from tests.checkpoints import make_checkpoint


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_file_that_transformers_write_by_default_is_silent(tmp_path: Path) -> None:
    assert ignored(tmp_path) == {}
    GenerationConfig(eos_token_id=[1, 2], pad_token_id=0).save_pretrained(tmp_path)
    assert ignored(tmp_path) == {}
    every = {**GenerationConfig._get_default_generation_params(), "do_sample": False}
    assert ignored(write(tmp_path, every)) == {}


def test_each_field_that_changes_a_text_is_named(tmp_path: Path) -> None:
    """Each field that changes the generated text and that ark does not support is named in a
    warning. Tested for all fields of transformers' class, each with another value than its default.
    """
    defaults = GenerationConfig._get_default_generation_params()
    others = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v + 0.5}
    for name, value in defaults.items():
        if name in READ:
            continue
        change = others.get(type(value), lambda v: [[3]])(value)
        needed = {"do_sample": True} if name in SAMPLED else {}
        needed |= {"num_beams": 2} if name in BEAMS else {}
        actual = ignored(write(tmp_path, {**needed, name: change}))
        silent = name in WITHOUT_EFFECT or name.startswith(ASSISTED)
        assert (name in actual) == (not silent), name
        assert set(actual) - {name} == set(needed) - set(READ)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, []),  # ignored without do_sample
        ({"do_sample": True, "temperature": 0.6, "top_p": 1}, []),
        ({"do_sample": True, "temperature": 1.0, "top_h": 0.4}, ["top_h"]),
        ({"suppress_tokens": [1], "bad_words_ids": [[1]]}, ["bad_words_ids"]),
        ({"a_field_of_tomorrow": 3}, ["a_field_of_tomorrow"]),
        ({"eos_token_id": 5, "bos_token_id": 1, "transformers_version": "4.1"}, []),
    ],
)  # fmt: skip
def test_ignored_fields_are_named(tmp_path: Path, fields: dict[str, Any], names: list[str]) -> None:
    assert list(ignored(write(tmp_path, fields))) == names


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"do_sample": False, "temperature": 0.6, "top_k": 9},
        {"do_sample": True},
        {"do_sample": True, "temperature": 0.6, "top_k": None, "top_p": 0.9, "min_p": 0.1},
        {"do_sample": True, "top_k": 0, "typical_p": 0.5, "repetition_penalty": 1.2},
        {"max_new_tokens": 7, "min_new_tokens": 3, "suppress_tokens": [4, 5]},
        {"stop_strings": "end"},
        {"stop_strings": ["a", "b"], "do_sample": True},
    ],
)
def test_fields_are_read_as_transformers_reads_them(fields: dict[str, Any], tmp_path: Path) -> None:
    """The values of all fields equal the values that transformers' generate would use."""
    theirs = GenerationConfig.from_pretrained(write(tmp_path, fields))
    theirs.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    ours = SamplingParams(**{"max_tokens": None, **sampling_fields(tmp_path)})
    assert ours.greedy == (not theirs.do_sample)
    if theirs.do_sample:
        for name in ("temperature", "top_k", "top_p", "typical_p"):
            assert getattr(ours, name) == getattr(theirs, name), name
        assert ours.min_p == (theirs.min_p or 0)
    assert ours.repetition_penalty == theirs.repetition_penalty
    assert ours.max_tokens == theirs.max_new_tokens
    assert ours.min_tokens == (theirs.min_new_tokens or 0)
    assert ours.suppress_tokens == tuple(theirs.suppress_tokens or ())
    stop = theirs.stop_strings or []
    assert ours.stop == ((stop,) if isinstance(stop, str) else tuple(stop))


def test_warning_names_ignored_fields_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"do_sample": True, "temperature": 0.6, "no_repeat_ngram_size": 3})
    sampling_fields(tmp_path, warn=False)
    assert not capsys.readouterr().err
    sampling_fields(tmp_path)
    errors = capsys.readouterr().err
    assert "no_repeat_ngram_size 3, which ark does not support" in errors
    assert "temperature" not in errors


def test_options_come_before_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path, layers=1, hidden=32, intermediate=48)
    write(folder, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_new_tokens": 3})
    calls = []
    stream = Generator.stream

    def recording(self: Generator, prompt: Any, most: int, how: SamplingParams) -> Any:
        calls.append((most, how.temperature, how.top_k, how.top_p, self.shape.sampling))
        return stream(self, prompt, most, how)

    monkeypatch.setattr(Generator, "stream", recording)
    argv = ["generate", str(folder), "--backend", "cpu", "--prompt", "x", "--json"]
    assert main(argv) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) <= 3
    assert main([*argv, "--temperature", "0.5", "--top-k", "4", "--max-new-tokens", "2"]) == 0
    assert main([*argv, "--top-p", "1"]) == 0
    assert calls == [
        (3, 0.6, 50, 0.9, "full"),
        (2, 0.5, 4, 0.9, "full"),
        (3, 0.6, 50, 1.0, ""),  # the plan for greedy and top-k sampling only is shorter
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"do_sample": "yes"}, "do_sample should be true or false"),
        ({"do_sample": True, "top_p": 2}, "generation_config.json: top_p is 2"),
        ({"suppress_tokens": [-1]}, "generation_config.json: an id of suppress_tokens"),
        ({"max_new_tokens": 0}, "max_tokens is 0"),
    ],
)
def test_values_out_of_range_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=words):
        sampling_fields(write(tmp_path, fields))


def test_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ModelError, match="not valid JSON"):
        ignored(tmp_path)
