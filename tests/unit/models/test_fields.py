"""JSON files of a checkpoint: text that cannot be encoded is refused when a file is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ark.errors import ModelError
from ark.models.fields import Fields


@pytest.mark.parametrize("text", ['{"eos_token": "\\udc80"}', '{"a": [{"\\ud800": 1}]}'])
def test_half_a_surrogate_pair_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(text)
    with pytest.raises(ModelError, match="is not valid JSON"):
        Fields.read(path)


def test_whole_pair_is_one_character(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text('{"eos_token": "\\ud83d\\ude00"}')
    assert Fields.read(path).get("eos_token") == "\U0001f600"
