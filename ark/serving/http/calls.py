"""Finds tool calls (function calls) in the text of an answer. Each family of models writes tool
calls in a different format. Called by ark.serving.http.chats.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ark.models.chat import ChatTemplates
from ark.models.stops import overlap


@dataclass(frozen=True)
class Call:
    """A model's call of a function (tool). arguments: the arguments as the text of a JSON
    object.
    """

    name: str
    arguments: str

    def content(self) -> dict[str, Any]:
        """The call as an entry of OpenAI's `tool_calls`, with a new random id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


Part = str | Call


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model writes tool calls. They are between the marks `begin` and `end`,
    or from `begin` to the end of the text if `end` is empty. starts: if a text begins with one of
    these characters, the whole text consists of calls. calls: the function that parses the text
    between the marks; it raises ValueError if the text is not a call.
    """

    name: str
    calls: Callable[[str], list[Call]]
    begin: str
    end: str = ""
    starts: str = ""
    others: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that mark the begin and the end of calls. In some vocabularies they are special
        tokens.
        """
        return tuple(mark for mark in (self.begin, self.end, *self.others) if mark)


def _call(value: Any) -> Call:
    """A call from its JSON object, which has a name and arguments (Llama names them
    `parameters`).
    """
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("the call has no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("the call has no arguments")
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))


def _listed(text: str) -> list[Call]:
    """The calls of a JSON list, or of consecutive JSON objects."""
    decoder, calls, rest = json.JSONDecoder(), [], text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        calls += [_call(one) for one in (value if isinstance(value, list) else [value])]
        rest = rest[end:].lstrip(" \t\r\n;,")
    if not calls:
        raise ValueError("the text has no calls")
    return calls


NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})", re.DOTALL)


def _mistral(text: str) -> list[Call]:
    """Mistral's calls: a JSON list of calls, or a name and arguments after each mark."""
    text = text.strip()
    if text.startswith(("[", "{")):
        return _listed(text)
    calls = []
    for part in text.split("[TOOL_CALLS]"):
        match = NAMED.fullmatch(part.strip())
        if match is None:
            raise ValueError("the text is neither a list nor a name with arguments")
        calls.append(_call({"name": match[1], "arguments": json.loads(match[2])}))
    return calls


def _pythonic(text: str) -> list[Call]:
    """The calls of a Python list of call expressions, whose keyword arguments must be literals."""
    tree = ast.parse(text.strip(), mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("the text is not a list")
    calls = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("an entry of the list is not a call")
        values = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if k.arg}
        if len(values) != len(node.keywords):
            raise ValueError("the arguments have no names")
        calls.append(Call(node.func.id, json.dumps(values, ensure_ascii=False)))
    return calls


FORMATS = {
    known.name: known
    for known in (
        CallFormat("hermes", _listed, "<tool_call>", "</tool_call>"),
        CallFormat("mistral", _mistral, "[TOOL_CALLS]", others=("[ARGS]", "[CALL_ID]")),
        CallFormat("llama3_json", _listed, "<|python_tag|>", starts="{"),
        CallFormat("pythonic", _pythonic, "<|python_start|>", "<|python_end|>", starts="["),
    )
}


def format_of(templates: ChatTemplates) -> CallFormat | None:
    """The format in which a checkpoint's chat template writes calls; None if ark does not know
    it.
    """
    text = "\n".join(templates.texts.values())
    for name in ("hermes", "mistral", "pythonic"):
        if FORMATS[name].begin in text:
            return FORMATS[name]
    llama = "<|python_tag|>" in text or re.search(r'"name": .*"parameters": ', text)
    return FORMATS["llama3_json"] if llama else None


class Reader:
    """Splits an answer's text into content and tool calls while the text arrives. A call is
    returned when it is complete. form: the format of calls; None if the whole text is content.
    """

    def __init__(self, form: CallFormat | None) -> None:
        self._form = form
        self._held = ""
        self._begun = form is None or not form.starts
        self._whole = self._inside = self._called = False

    def push(self, text: str) -> list[Part]:
        """Appends text. Returns the parts (content or tool calls) that are now complete."""
        if self._form is None:
            return [text] if text else []
        self._held += text
        parts: list[Part] = []
        while self._advance(self._form, parts):
            pass
        return parts

    def _advance(self, form: CallFormat, parts: list[Part]) -> bool:
        """Processes the text up to the next mark. Returns False if no complete mark has arrived
        yet.
        """
        if not self._begun:
            head = self._held.lstrip()
            self._begun, self._whole = bool(head), head[:1] in tuple(form.starts)
        if self._whole or not self._begun:
            return False
        mark = form.end if self._inside else form.begin
        at = self._held.find(mark) if mark else -1
        if at < 0:
            if not self._inside:
                shown = len(self._held) - overlap(self._held, mark)
                self._take(parts, self._held[:shown])
                self._held = self._held[shown:]
            return False
        before, self._held = self._held[:at], self._held[at + len(mark) :]
        self._take(parts, before, mark)
        self._inside = not self._inside
        return True

    def _take(self, parts: list[Part], text: str, end: str = "") -> None:
        """Appends the text between two marks to `parts`: parsed as calls if the marks enclose
        calls, otherwise as content. White space between calls is omitted.
        """
        form = self._form
        if form is not None and (self._inside or self._whole):
            calls = calls_in(form, text)
            parts += calls or [(form.begin if self._inside else "") + text + end]
            self._called = self._called or bool(calls)
        elif text and not (self._called and text.isspace()):
            parts.append(text)

    def finish(self) -> list[Part]:
        """The remaining parts. Called after the whole text has arrived."""
        parts: list[Part] = []
        if self._form is not None and (self._held or self._inside):
            self._take(parts, self._held)
        return parts


def calls_in(form: CallFormat, text: str) -> list[Call]:
    """The calls in a text; empty if the text is not in the format."""
    try:
        return form.calls(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []


class ForcedReader:
    """Parses an answer that a grammar forces to be calls (ark.serving.http.forms.call_form). name:
    if the text consists only of the arguments of a call, the name of the called tool; None if the
    text is a list of calls.
    """

    def __init__(self, name: str | None) -> None:
        self._name, self._text = name, ""

    def push(self, text: str) -> list[Part]:
        """Returns no parts: the calls are returned at the end."""
        self._text += text
        return []

    def finish(self) -> list[Part]:
        """The tool calls. A list of calls that is incomplete, because the text was cut off, is
        returned as text.
        """
        if self._name is not None:
            return [Call(self._name, self._text)]
        calls: Sequence[Part] = calls_in(FORMATS["llama3_json"], self._text)
        return [*calls] or [self._text]
