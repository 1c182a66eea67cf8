"""Conversations through chat templates, compared with transformers' apply_chat_template."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ark.errors import InvalidUsageError, ModelError
from ark.models.chat import ChatTemplates
from ark.models.tokenizer import Tokenizer
from tests.chat_templates import CHATML, EVERY, HEADERS, TURNS
from tests.checkpoints import BOS, EOS, make_tokenizer

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "<é>", "b": 1}}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "Adds <1>", "parameters": {"type": "object"}},
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello  "}],
    "system": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi"}],
    "turns": [
        {"role": "user", "content": "a < b & c"},
        {"role": "assistant", "content": "é \U0001f642 "},
        {"role": "user", "content": ""},
    ],
    "tools": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "name": "f", "content": "3 \"q\""},
    ],
    "two-calls": [{"role": "assistant", "tool_calls": [CALL, CALL]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "image"}]}],
    "reasoning": [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y", "reasoning": "\nbecause\n"},
    ],
    "skips": [{"role": "skip", "content": "a"}, {"role": "user", "content": "b"},
              {"role": "halt", "content": "c"}, {"role": "user", "content": "d"}],
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"tools": [TOOL]},
    {"enable_thinking": False, "date_string": "today", "documents": [{"title": "T", "text": "x"}]},
    {"add_generation_prompt": False, "continue_final_message": True},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a directory for each template, as transformers saves it."""
    base = tmp_path_factory.mktemp("chat")
    for name, text in EVERY.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=make_tokenizer(320), bos_token=BOS, eos_token=EOS
        )
        tokenizer.chat_template = text
        tokenizer.save_pretrained(base / name)
    return {name: base / name for name in EVERY}


@functools.cache
def open_both(folder: Path) -> tuple[Any, Tokenizer, ChatTemplates]:
    tokenizer = Tokenizer.open(folder)
    templates = ChatTemplates.open(folder, tokenizer.special_tokens)
    return AutoTokenizer.from_pretrained(folder), tokenizer, templates


def compare(theirs: Any, own: tuple[Tokenizer, ChatTemplates], messages: Any, **how: Any) -> str:
    """Asserts that ark and transformers give equal texts and ids, or that both refuse the
    conversation. Returns the text.
    """
    tokenizer, templates = own
    how = {"add_generation_prompt": True, **how}
    try:
        right = theirs.apply_chat_template(messages, tokenize=False, **how)
    except Exception:
        with pytest.raises(InvalidUsageError):
            templates.render(messages, **how)
        return ""
    text = templates.render(messages, **how)
    assert text == right
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
    assert tokenizer.encode(text, framed=False) == ids
    return text


@pytest.mark.parametrize("template", list(EVERY))
def test_texts_and_ids_equal_transformers(template: str, folders: dict[str, Path]) -> None:
    theirs, *own = open_both(folders[template])
    texts = [
        compare(theirs, (own[0], own[1]), messages, **how)
        for messages in CONVERSATIONS.values()
        for how in OPTIONS
    ]
    assert len(set(texts)) > 5  # most templates are rendered, and texts differ


def test_begin_token_comes_once(folders: dict[str, Path]) -> None:
    _, tokenizer, templates = open_both(folders["headers"])
    text = templates.render(CONVERSATIONS["one"])
    assert text.startswith(BOS)
    for framed in (True, False):
        assert tokenizer.encode(text, framed=framed).count(0) == 1
    assert tokenizer.encode(text.removeprefix(BOS), framed=True)[0] == 0


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool"]), "content": WORDS},
        optional={"name": WORDS, "reasoning_content": st.none() | WORDS, "thinking": WORDS},
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(MESSAGES, st.sampled_from(list(EVERY)), st.sampled_from(OPTIONS))
def test_any_conversation(
    folders: dict[str, Path], messages: Any, template: str, how: dict[str, Any]
) -> None:
    theirs, *own = open_both(folders[template])
    compare(theirs, (own[0], own[1]), messages, **how)


def test_named_templates_in_each_place(folders: dict[str, Path], tmp_path: Path) -> None:
    """Templates in a list of tokenizer_config.json and in files; files take precedence."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folders["turns"] / name).read_text())
    path = tmp_path / "tokenizer_config.json"
    fields = json.loads(path.read_text())
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": HEADERS}]
    for value in (CHATML, named):
        path.write_text(json.dumps({**fields, "chat_template": value}))
        open_both.cache_clear()
        theirs, *own = open_both(tmp_path)
        for how in ({}, {"tools": [TOOL]}):
            compare(theirs, (own[0], own[1]), CONVERSATIONS["system"], **how)
    (tmp_path / "chat_template.jinja").write_text(TURNS)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].role }}")
    open_both.cache_clear()
    theirs, *own = open_both(tmp_path)
    compare(theirs, (own[0], own[1]), CONVERSATIONS["one"])
    assert own[1].render(CONVERSATIONS["one"], template="short") == "user"
    right = theirs.apply_chat_template(CONVERSATIONS["one"], chat_template="short", tokenize=False)
    assert right == "user"


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ namespace(_x=1) }}",
        "{{ (messages | attr('__init__')).__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.more }}",
    ],
)
def test_template_reaches_nothing_outside(text: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(InvalidUsageError, match="chat template"):
        ChatTemplates.open(tmp_path, {}).render(CONVERSATIONS["one"])


def test_faulty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidUsageError, match="no chat template"):
        ChatTemplates.open(tmp_path, {}).render(CONVERSATIONS["one"])
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": [{"name": "x"}]}')
    with pytest.raises(ModelError, match="chat_template should be a text, or a list"):
        ChatTemplates.open(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="not a valid template"):
        ChatTemplates.open(tmp_path, {}).render(CONVERSATIONS["one"])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        ChatTemplates.open(tmp_path, {})


@pytest.mark.parametrize(
    ("messages", "how", "words"),
    [
        ([], {}, "a list of no messages"),
        ("hello", {}, "give a list of objects"),
        ([{"content": "x"}], {}, "message 0 is .* expected an object with a role"),
        ([{"role": "user", "content": object()}], {}, "JSON values only"),
        ([{"role": "user", "content": {1: 2}}], {}, "JSON values only"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "exclude each"),
        (
            [{"role": "user", "content": []}],
            {"continue_final_message": True, "add_generation_prompt": False},
            "no text to continue",
        ),
    ],
)
def test_wrong_messages(
    messages: Any, how: dict[str, Any], words: str, folders: dict[str, Path]
) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        ChatTemplates.open(folders["turns"], {}).render(messages, **how)
