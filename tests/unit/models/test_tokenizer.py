"""Tokenizer compared with transformers' AutoTokenizer, and streamed text compared with decoding at
once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from ark.models.tokenizer import Tokenizer
from tests.cases.tokenizer import byte_fallback_tokenizer
from tests.checkpoints import BOS, EOS, make_tokenizer
from tests.slow import examples

TEXTS = (
    "",
    " ",
    "The king said to his servants,",
    "  two  spaces\nand a line",
    "naïve café, 日本語, 👩‍👩‍👧 and a tab\t.",
    f"{BOS}framed{EOS}",
)
VOCABULARY_SIZE = 320


BACKENDS = {"bytes": make_tokenizer(VOCABULARY_SIZE), "fallback": byte_fallback_tokenizer()}


def write(directory: Path, backend: Backend, config: dict[str, Any] | None) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    if config is not None:
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
        (directory / "tokenizer_config.json").write_text(json.dumps({**names, **config}))
    return directory


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": False},
        {"bos_token": {"content": EOS, "__type": "AddedToken"}},
    ],
)
def test_ids_are_those_of_transformers(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    write(tmp_path, BACKENDS[kind], config)
    ours, theirs = Tokenizer.open(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        framed = text.startswith(BOS)  # as a chat template's text is
        assert ours.encode(text) == theirs(text, add_special_tokens=not framed).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text).input_ids, skip_special_tokens=True
        )


def test_truncation_and_padding_in_the_file_do_not_apply(tmp_path: Path) -> None:
    backend = make_tokenizer(VOCABULARY_SIZE)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    write(tmp_path, backend, None)
    assert (
        Tokenizer.open(tmp_path).encode("a long text")
        == BACKENDS["bytes"].encode("a long text").ids
    )


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_streamed_text_is_the_text_of_all_tokens(kind: str, data: st.DataObject) -> None:
    tokenizer = Tokenizer(BACKENDS[kind])
    size = tokenizer.backend.get_vocab_size()
    words = st.text(max_size=8).map(lambda text: tokenizer.backend.encode(text).ids)
    noise = st.lists(st.integers(0, size - 1), max_size=8)
    parts = data.draw(st.lists(st.one_of(words, noise), max_size=6))
    ids = [token for part in parts for token in part]
    stream = tokenizer.stream()
    text = ""
    for token in ids:
        text += stream.push(token)
        assert not text.endswith("\ufffd")
        assert tokenizer.decode(ids).startswith(text)
    assert text + stream.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", BACKENDS)
@settings(max_examples=50, deadline=None)
@given(prompt=st.text(min_size=1, max_size=10), more=st.text(max_size=10))
def test_streamed_text_goes_on_where_the_prompt_ended(kind: str, prompt: str, more: str) -> None:
    tokenizer = Tokenizer(BACKENDS[kind])
    first = tokenizer.encode(prompt)
    new = tokenizer.backend.encode(more, add_special_tokens=False).ids
    stream = tokenizer.stream(first)
    text = "".join(stream.push(token) for token in new) + stream.finish()
    assert tokenizer.decode(first) + text == tokenizer.decode(first + new)


def test_character_of_several_tokens_comes_whole() -> None:
    tokenizer = Tokenizer(BACKENDS["bytes"])
    ids = tokenizer.backend.encode("é日", add_special_tokens=False).ids
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == ["", "é", "", "", "日"]
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\ufffd"


def test_step_does_not_decode_all_that_came_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(BACKENDS["bytes"])
    stream = tokenizer.stream(tokenizer.encode("a prompt of some length"))
    longest: list[int] = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: longest.append(len(ids)) or decode(ids))
    for token in tokenizer.encode("The quick brown fox jumps over the lazy dog.") * 4:
        stream.push(token)
    assert max(longest[6:]) <= 4


def test_prompt_that_the_model_cannot_take() -> None:
    tokenizer = Tokenizer(BACKENDS["bytes"], vocab_size=100)
    with pytest.raises(ModelError, match=r"the model has 100 tokens"):
        tokenizer.encode("zebra")
    with pytest.raises(InvalidUsageError, match="not UTF-8"):
        tokenizer.encode("a\udcffb")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        Tokenizer.open(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.open(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model"):
        Tokenizer.open(tmp_path)
    for content, words in (
        ("{", "not valid JSON"),
        ('{"version": "9"}', "cannot be read by the tokenizers package"),
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(ModelError, match=words):
            Tokenizer.open(tmp_path)


@pytest.mark.parametrize("where", ["reading", "encoding"])
def test_tokenizer_that_panics_is_named(where: str, tmp_path: Path) -> None:
    """A tokenizer.json on which the tokenizers package panics, with a BaseException that is not an
    Exception, gives a ModelError. The files were found by fuzzing.
    """
    make_tokenizer(VOCABULARY_SIZE).save(str(tmp_path / "tokenizer.json"))
    path = tmp_path / "tokenizer.json"
    data = json.loads(path.read_text())
    if where == "reading":
        data["model"]["continuing_subword_prefix"] = "a prefix longer than any token"
    else:
        data["post_processor"]["single"][0]["SpecialToken"]["id"] = "<none>"
    path.write_text(json.dumps(data))
    with pytest.raises(ModelError, match="makes the tokenizers package fail"):
        Tokenizer.open(tmp_path).encode("The king")
