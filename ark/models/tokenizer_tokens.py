"""Adds the tokens that tokenizer_config.json, added_tokens.json and special_tokens_map.json
declare, as transformers does. Called by ark.models.tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ark.models.fields import Fields
from ark.models.tokenizer_classes import TokenizerClass

NAMED = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # the second is the older name
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Token = str | AddedToken


@dataclass
class Declared:
    """The tokens that a directory's files declare. numbered: tokens with fixed ids. named: special
    tokens by purpose (bos_token, ...), in the order in which they are added. extra: further special
    tokens.
    """

    numbered: dict[int, AddedToken] = field(default_factory=dict)
    named: dict[str, Token] = field(default_factory=dict)
    extra: list[Token] = field(default_factory=list)

    @property
    def special(self) -> list[str]:
        """The texts of all special tokens, without duplicates."""
        return list(dict.fromkeys(map(_content, (*self.named.values(), *self.extra))))


def declared(
    folder: Path, settings: Fields, added: Mapping[int, AddedToken], special: Mapping[str, str]
) -> Declared:
    """The tokens that the files of a directory declare. settings: the content of
    tokenizer_config.json. added: the added tokens in tokenizer.json. special: the default texts of
    named tokens.
    """
    result = Declared()
    values = dict(settings.values)
    extra = values.get(EXTRA[0]) or values.get(EXTRA[1]) or []
    if "added_tokens_decoder" in values:
        table = settings.table("added_tokens_decoder")
        for number, entry in (table.values if table else {}).items():
            if not number.isdecimal():
                raise settings.wrong("added_tokens_decoder", "an object from ids to tokens")
            result.numbered[int(number)] = _token(settings, "added_tokens_decoder", entry)
    else:
        extra = _older(folder, settings, values, extra, result)
        result.numbered.update(added)
    by_content = {t.content: t for t in result.numbered.values()}
    for name in NAMED:
        value = values[name] if name in values else special.get(name)
        if value is not None:
            token = _given(settings, name, value)
            result.named[name] = by_content.get(_content(token), token)
    others = {n: v for n, v in values.items() if n.endswith("_token") and n not in NAMED}
    if isinstance(extra, dict):
        others, extra = {**others, **extra}, []
    if not isinstance(extra, list):
        raise settings.wrong("extra_special_tokens", "a list of tokens")
    for name, value in others.items():
        if isinstance(value, (str, dict)):
            result.named[name] = _given(settings, name, value)
    result.extra = [_given(settings, "extra_special_tokens", value) for value in extra]
    return result


def add(backend: Tokenizer, tokens: Declared, kind: TokenizerClass | None) -> None:
    """Adds the tokens that the tokenizer lacks. The order is that of transformers, because it
    determines their ids.
    """
    there = backend.get_added_tokens_decoder().values()
    known = {repr(token) for token in there}
    new: list[Token] = [t for _, t in sorted(tokens.numbered.items()) if repr(t) not in known]
    names = {t.content for t in there} | {_content(t) for t in new}
    for token in (*tokens.named.values(), *tokens.extra):
        if _content(token) not in names and token not in new:
            new.append(token)
    special = {_content(t) for t in tokens.named.values()}
    backend.add_tokens([_as_special(t, special) for t in new])
    if kind is not None and kind.adds_special:
        backend.add_tokens([AddedToken(t, special=True) for t in tokens.special])


def _as_special(token: Token, special: Iterable[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if not token.special and token.content in special:
        token.special = True
    return token


def _older(
    folder: Path, settings: Fields, values: dict[str, Any], extra: Any, result: Declared
) -> Any:
    """Reads special_tokens_map.json into `values` and added_tokens.json into `result`. Returns the
    further special tokens.
    """
    later: Any = []  # special tokens that added_tokens.json does not list
    path = folder / "special_tokens_map.json"
    if path.exists():
        fields = Fields.read(path)
        more = fields.values.get(EXTRA[0])
        if isinstance(more, list) and isinstance(extra, list):
            extra = [*extra, *(token for token in more if token not in extra)]
        elif more is not None:
            extra = more
        elif not set(EXTRA) & set(settings.values):
            later = fields.values.get(EXTRA[1]) or []
        for name, entry in fields.values.items():
            if name.endswith("_token"):
                whole = {**entry, "special": True} if isinstance(entry, dict) else entry
                values[name] = _given(fields, name, whole) if whole else None
    path = folder / "added_tokens.json"
    if path.exists():
        fields = Fields.read(path)
        listed = extra if isinstance(extra, list) else []
        # As in transformers, tokens that the file writes as objects are not special.
        named = [*listed, *(values.get(name) for name in NAMED)]
        special = {_content(token) for token in named if isinstance(token, Token)}
        for content, number in fields.values.items():
            if type(number) is not int or number < 0:
                raise fields.wrong(content, "a token's id")
            known = content in special
            result.numbered[number] = AddedToken(content, normalized=not known, special=known)
    return extra or later


def _given(settings: Fields, name: str, value: Any) -> Token:
    return value if isinstance(value, Token) else _token(settings, name, value)


def _token(settings: Fields, name: str, entry: Any) -> AddedToken:
    """A token from an entry that is an object."""
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise settings.wrong(name, "a token, or an object with its content")
    flags = {flag: entry[flag] for flag in FLAGS if flag in entry}
    if any(type(value) is not bool for value in flags.values()):
        raise settings.wrong(name, f"a token whose {', '.join(FLAGS)} are true or false")
    return AddedToken(entry["content"], **flags)


def _content(token: Token) -> str:
    return token if isinstance(token, str) else token.content
