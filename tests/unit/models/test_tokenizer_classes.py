"""Ids and text of every kind of tokenizer directory compared with transformers' AutoTokenizer:
classes, tokens that only one of the files declares, and the streamed text of any ids that a model
may draw.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from ark.errors import BaseError, ModelError, UnsupportedError
from ark.models.registry import MODEL_TYPES
from ark.models.tokenizer import Tokenizer
from ark.models.tokenizer_classes import CLASSES, CORRECTED, OTHERS, REGISTERED
from ark.models.tokenizer_tokens import FLAGS
from tests.cases.tokenizer import byte_fallback_tokenizer
from tests.checkpoints import BOS, EOS, make_tokenizer
from tests.slow import examples, few

NEW = ("<|im_start|>", "<|im_end|>", "<pad>", "<extra_0>", "word")
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def prepending() -> Backend:
    """Returns a tokenizer like Llama 2's older files: a normaliser puts U+2581 before each text,
    and text is not split.
    """
    backend = byte_fallback_tokenizer()
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = None
    return backend


def scored() -> Backend:
    """Returns a unigram tokenizer."""
    pieces = [("<unk>", 0.0), (BOS, 0.0), (EOS, 0.0)]
    pieces += [(f"<0x{i:02X}>", -9.0) for i in range(256)]
    pieces += [("▁", -2.0), ("a", -3.0), ("b", -3.0), ("▁a", -2.5), ("ab", -2.9), ("é", -4.0)]
    backend = Backend(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    )
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<unk>", BOS, EOS)])
    return backend


def split_by(pattern: str, composed: bool) -> Backend:
    """Returns a byte-level tokenizer that splits words by a pattern, as Llama 3 and Qwen do."""
    backend = make_tokenizer(320)
    if composed:
        backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A {EOS}", special_tokens=[(BOS, 0), (EOS, 1)]
    )
    return backend


KINDS = {
    "bytes": make_tokenizer(320).to_str(),
    "fallback": byte_fallback_tokenizer().to_str(),
    "prepending": prepending().to_str(),
    "scored": scored().to_str(),
    "llama3": split_by(LLAMA3_SPLIT, composed=False).to_str(),
    "composed": split_by(r"\p{N}|\s+|\S+", composed=True).to_str(),
}
NAMES = (
    None,
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "NoSuchTokenizer",
    *(f"{name}{end}" for name in CLASSES for end in ("", "Fast")),
)
PIECES = (*NEW, BOS, EOS, "<unk>", " ", "  ", "a", "ab", " ab", "é", "e\u0301", "日", "👩\u200d👧")
PIECES += ("12345", "\n", "'s", "▁", "▁a", "the fox", "\t.")
TEXT = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)
flags = st.fixed_dictionaries(
    {},
    optional={flag: st.booleans() for flag in FLAGS},
)
content = st.sampled_from([*NEW, BOS, EOS])
token = st.one_of(
    content, st.builds(lambda c, f: {"__type": "AddedToken", "content": c, **f}, content, flags)
)
numbered = st.lists(
    st.tuples(st.integers(0, 400).map(str), content, flags),
    unique_by=(lambda t: t[0], lambda t: t[1]),  # type: ignore[arg-type]
    max_size=4,
).map(lambda rows: {number: {"content": c, **f} for number, c, f in rows})
# transformers' Gemma class builds its own tokenizer; ark reads the file instead, with a warning.
READ = [name for name in MODEL_TYPES if REGISTERED.get(name) != "GemmaTokenizer"]
directory = st.fixed_dictionaries(
    {"kind": st.sampled_from(sorted(KINDS)), "model_type": st.sampled_from([None, *READ])},
    optional={
        "added": st.dictionaries(content, st.integers(0, 400), max_size=3),
        "map": st.fixed_dictionaries(
            {},
            optional={
                "eos_token": st.one_of(content, st.builds(lambda c: {"content": c}, content)),
                "additional_special_tokens": st.lists(content, max_size=2),
            },
        ),
    },
)
configs = st.fixed_dictionaries(
    {"tokenizer_class": st.sampled_from(NAMES)},
    optional={
        "legacy": st.booleans(),
        "add_prefix_space": st.booleans(),
        "add_bos_token": st.booleans(),
        "bos_token": st.one_of(token, st.none()),
        "eos_token": token,
        "pad_token": token,
        "unk_token": st.one_of(st.just("<unk>"), st.none()),
        "image_token": content,
        "additional_special_tokens": st.lists(token, max_size=3),
        "extra_special_tokens": st.lists(content, max_size=2),
        "added_tokens_decoder": numbered,
        "split_special_tokens": st.booleans(),
        "clean_up_tokenization_spaces": st.just(False),
    },
)


def write(folder: Path, where: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / "tokenizer.json").write_text(KINDS[where["kind"]])
    named = {
        key: value for key, value in config.items() if (key, value) != ("tokenizer_class", None)
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    if where["model_type"]:
        (folder / "config.json").write_text(json.dumps({"model_type": where["model_type"]}))
    for key, name in (("added", "added_tokens.json"), ("map", "special_tokens_map.json")):
        if key in where:
            (folder / name).write_text(json.dumps(where[key]))
    return folder


def check(folder: Path, texts: list[str], drawn: list[int]) -> None:
    """Asserts that a tokenizer folder gives transformers' ids for the texts and transformers' text
    for the ids `drawn`, at once and streamed, if transformers can load it.
    """
    try:
        theirs = AutoTokenizer.from_pretrained(folder)
        expected = [theirs(text).input_ids for text in texts]
    except Exception:  # no expected result if transformers cannot load it
        with contextlib.suppress(BaseError):
            Tokenizer.open(folder)
        return
    ours = Tokenizer.open(folder)
    special = {i for i, t in theirs.added_tokens_decoder.items() if t.special}
    assert ours.special_ids == special
    for text, ids in zip(texts, expected, strict=True):
        if ids[:1] == ids[1:2] and ids[:1] and ids[0] in special:
            plain = theirs(text, add_special_tokens=False).input_ids
            ids = plain if len(plain) < len(ids) else ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    ids = [i % len(theirs) for i in drawn]
    stream = ours.stream()
    streamed = "".join([*(stream.push(i) for i in ids), stream.finish()])
    assert streamed == theirs.decode(ids, skip_special_tokens=True)


@settings(
    max_examples=examples(1000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    where=directory,
    config=configs,
    texts=st.lists(TEXT, min_size=1, max_size=4),
    drawn=st.lists(st.integers(0, 1 << 20), max_size=12),
)
def test_any_directory_is_read_as_transformers_read_it(
    tmp_path: Path,
    where: dict[str, Any],
    config: dict[str, Any],
    texts: list[str],
    drawn: list[int],
) -> None:
    check(write(tmp_path / "made", where, config), texts, drawn)


ALL = ["a  ab é12345", f"<|im_start|>ab<|im_end|> a{EOS}ab", "▁a word", ""]


@pytest.mark.parametrize(
    ("kind", "name", "model_type"),
    few(
        30,
        itertools.product(
            KINDS,
            [n for n in NAMES if n is None or not n.endswith("Fast")],
            [None, "llama", "mistral", "qwen3"],
        ),
    ),
)
def test_every_class_of_every_file(
    tmp_path: Path, kind: str, name: str | None, model_type: str | None
) -> None:
    where = {"kind": kind, "model_type": model_type}
    for more in ({}, {"legacy": True}, {"added_tokens_decoder": {}, "add_prefix_space": False}):
        config = {"tokenizer_class": name, "eos_token": "<|im_end|>", **more}
        check(write(tmp_path / "made", where, config), ALL, [5, 300, 319, 320, 1])


@pytest.mark.parametrize(
    ("where", "config"),
    [
        ({}, {"additional_special_tokens": ["<|im_start|>"]}),
        ({}, {"added_tokens_decoder": {"320": {"content": "<|im_start|>", "special": True}}}),
        ({}, {"eos_token": "<|im_start|>"}),
        ({"added": {"<|im_start|>": 320}}, {}),
        ({"map": {"additional_special_tokens": ["<|im_start|>"]}}, {}),
    ],
)
def test_token_that_one_file_alone_declares_is_one_id(
    tmp_path: Path, where: dict[str, Any], config: dict[str, Any]
) -> None:
    folder = write(tmp_path / "made", {"kind": "bytes", "model_type": None, **where}, config)
    assert len(Tokenizer.open(folder).encode("<|im_start|>")) == 2  # with the begin token
    check(folder, ALL, [320])


@pytest.mark.parametrize("kind", ["bytes", "llama3", "fallback"])
def test_text_of_a_chat_template_has_one_begin_token(tmp_path: Path, kind: str) -> None:
    """A text from a chat template, which contains the begin token, is encoded to the ids of
    apply_chat_template, without a second begin token.
    """
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    config = {"bos_token": BOS, "chat_template": template}
    folder = write(tmp_path / "made", {"kind": kind, "model_type": None}, config)
    theirs = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "ab a"}]
    text = theirs.apply_chat_template(messages, tokenize=False)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False)
    ours = Tokenizer.open(folder)
    assert ours.encode(text) == ids
    assert ours.encode(text).count(ours.encode(BOS)[0]) == 1


def test_classes_are_those_of_transformers() -> None:
    """ark knows all of transformers' classes that build their own tokenizer."""
    known = {*TOKENIZER_MAPPING_NAMES.values(), "CodeLlamaTokenizer", "GPT2Tokenizer"}
    classes = (tokenizer_class_from_name(name) for name in known if name)
    building = {
        c.__name__
        for c in classes
        if c is not None and issubclass(c, TokenizersBackend) and "__init__" in vars(c)
    } - {"TokenizersBackend"}
    assert building == {*CLASSES, *(f"{name}Tokenizer" for name in OTHERS.split())}
    for kind in MODEL_TYPES:
        assert REGISTERED.get(kind) == TOKENIZER_MAPPING_NAMES.get(kind)
        own = REGISTERED.get(kind) in CLASSES
        assert (kind in CORRECTED) == (own and kind in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS)


def test_class_that_ark_does_not_build_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = {"kind": "bytes", "model_type": "llama"}
    Tokenizer.open(write(tmp_path / "made", where, {"tokenizer_class": "GemmaTokenizer"}))
    assert "GemmaTokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "config", "error", "words"),
    [
        ("bytes", {"eos_token": 3}, ModelError, "eos_token should be a token"),
        ("bytes", {"added_tokens_decoder": {"x": {"content": "a"}}}, ModelError, "from ids"),
        ("bytes", {"added_tokens_decoder": {"7": "a"}}, ModelError, "object with its content"),
        ("bytes", {"extra_special_tokens": 4}, ModelError, "a list of tokens"),
        ("bytes", {"pad_token": {"content": "a", "special": 1}}, ModelError, "true or false"),
        ("bytes", {"fix_mistral_regex": True}, UnsupportedError, "fix_mistral_regex"),
        ("scored", {"clean_up_tokenization_spaces": True}, UnsupportedError, "clean_up"),
    ],
)
def test_invalid_tokenizer_files_are_refused(
    tmp_path: Path, kind: str, config: dict[str, Any], error: type[Exception], words: str
) -> None:
    folder = write(tmp_path / "made", {"kind": kind, "model_type": None}, config)
    with pytest.raises(error, match=words):
        Tokenizer.open(folder)
