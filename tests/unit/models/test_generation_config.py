"""What generation_config.json asks for and ark does not do is named; all else is silent."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from ark.backend import registry
from ark.errors import ModelError
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.generation import ASSISTED, BEAMS, SAMPLED, WITHOUT_EFFECT, ignored
from tests.checkpoints import make_checkpoint


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_a_file_that_transformers_write_by_default_is_silent(tmp_path: Path) -> None:
    assert ignored(tmp_path) == {}
    GenerationConfig(eos_token_id=[1, 2], pad_token_id=0).save_pretrained(tmp_path)
    assert ignored(tmp_path) == {}
    every = {**GenerationConfig._get_default_generation_params(), "do_sample": False}
    assert ignored(write(tmp_path, every)) == {}


def test_each_field_that_changes_a_text_is_named(tmp_path: Path) -> None:
    """All fields of transformers' class, each with a value that is not its default."""
    defaults = GenerationConfig._get_default_generation_params()
    others = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v + 0.5}
    for name, value in defaults.items():
        change = others.get(type(value), lambda v: [[3]])(value)
        needed = {"do_sample": True} if name in SAMPLED else {}
        needed |= {"num_beams": 2} if name in BEAMS else {}
        found = ignored(write(tmp_path, {**needed, name: change}))
        silent = name in WITHOUT_EFFECT or name.startswith(ASSISTED)
        assert (name in found) == (not silent), name
        assert set(found) - {name} == set(needed)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, []),  # without do_sample
        ({"do_sample": True, "temperature": 0.6, "top_p": 1}, ["do_sample", "temperature"]),
        ({"do_sample": True, "temperature": 1.0, "top_k": 50}, ["do_sample", "top_k"]),
        ({"suppress_tokens": [1], "bad_words_ids": None}, ["suppress_tokens"]),
        ({"a_field_of_tomorrow": 3}, ["a_field_of_tomorrow"]),
        ({"eos_token_id": 5, "bos_token_id": 1, "transformers_version": "4.1"}, []),
    ],
)  # fmt: skip
def test_which_are_named(tmp_path: Path, fields: dict[str, Any], names: list[str]) -> None:
    assert list(ignored(write(tmp_path, fields))) == names


def test_a_generator_says_so_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = make_checkpoint(tmp_path, layers=1, hidden=32, intermediate=48)
    write(directory, {"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1})
    chosen, _ = registry.choose("cpu")
    with (
        closing(chosen.open(0)) as device,
        Generator(Checkpoint.open(directory), chosen, device, chunk=1),
    ):
        said = capsys.readouterr().err
    assert said.count("generation_config.json") == 1
    for words in ("do_sample true", "temperature 0.6", "repetition_penalty 1.1", "does not follow"):
        assert words in said


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ModelError, match="not valid JSON"):
        ignored(tmp_path)
