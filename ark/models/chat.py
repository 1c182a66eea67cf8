"""The chat templates of a checkpoint, which render messages to the text of a prompt as
transformers' `apply_chat_template` does. Used by `ark generate --chat`, `ark.LLM.chat` and the
server.

A template is untrusted: it runs in jinja2's immutable sandbox and receives plain JSON values only.
The rendered text contains the special tokens, so it is encoded by `Tokenizer.encode(text,
framed=False)`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ark.errors import InvalidUsageError, ModelError
from ark.models.fields import Fields, check_file
from ark.models.gguf_file import is_gguf, read_gguf

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment

FILE, FOLDER, SETTINGS = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
DEFAULT, WITH_TOOLS = "default", "tool_use"
REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names under which a message may have its reasoning. Templates read one of the first two."""
END_MARK = "ARK_END_OF_THE_FINAL_MESSAGE "
"""Appended to a message that is to be continued, to find its end in the rendered text. The space at
the end of the mark shows whether the template strips messages.
"""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplates:
    """The templates of a directory, and the texts of its special tokens, both by name."""

    source: str
    texts: Mapping[str, str]
    special_tokens: Mapping[str, str]

    @classmethod
    def open(cls, directory: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplates:
        """Reads chat_template.jinja, additional_chat_templates/NAME.jinja and `chat_template` of
        tokenizer_config.json, which is a text or a list of named texts. Files take precedence. A
        GGUF file has a template in its metadata.

        special_tokens: Tokenizer.special_tokens. Raises ModelError if a file is damaged.
        """
        folder = Path(directory)
        if is_gguf(folder):
            template = read_gguf(folder).metadata.get("tokenizer.chat_template")
            own = {DEFAULT: template} if isinstance(template, str) else {}
            return cls(str(directory), own, dict(special_tokens))
        named = [(DEFAULT, folder / FILE)]
        named += [(path.stem, path) for path in sorted((folder / FOLDER).glob("*.jinja"))]
        texts = {name: _read(path) for name, path in named if path.exists()}
        settings = folder / SETTINGS
        if not texts and settings.exists():
            texts = _of_settings(Fields.read(settings))
        return cls(str(directory), texts, dict(special_tokens))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation.

        tools: JSON schemas. add_generation_prompt: True if the text ends where the answer begins.
        continue_final_message: True if it ends with the last message's content instead. template:
        the name or the text of a template; by default the checkpoint's template for tools (if tools
        are given) or its default template. variables: further values for the template, such as
        enable_thinking.

        Raises InvalidUsageError if the template refuses the messages, and ModelError if the
        template is faulty.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidUsageError(
                "continue_final_message and add_generation_prompt exclude each other; pass "
                "add_generation_prompt=False to continue the last message"
            )
        text = self._choose(template, tools is not None)
        chat = [_message(number, message) for number, message in enumerate(_listed(messages))]
        end = _mark_end(chat, text) if continue_final_message else ""
        values = {**self.special_tokens, **_plain("a variable", variables)}
        values["tools"] = None if tools is None else _plain("tools", _schemas(tools))
        values.setdefault("documents", None)
        rendered = self._rendered(text, chat, add_generation_prompt, values)
        return _cut_at_mark(rendered, end) if continue_final_message else rendered

    def _choose(self, template: str | None, with_tools: bool) -> str:
        names = (template,) if template else (WITH_TOOLS, DEFAULT) if with_tools else (DEFAULT,)
        for name in names:
            if name in self.texts:
                return self.texts[name]
        if template:
            return template
        if self.texts:
            raise InvalidUsageError(
                f"{self.source} has the chat templates {', '.join(sorted(self.texts))}, but none "
                "named default; name one of them"
            )
        raise InvalidUsageError(
            f"{self.source} has no chat template: neither {FILE} nor chat_template in {SETTINGS}. "
            "Use a checkpoint that was trained for chats, or give the whole prompt as text."
        )

    def _rendered(
        self, text: str, chat: list[dict[str, Any]], begins: bool, values: Mapping[str, Any]
    ) -> str:
        from jinja2 import TemplateError

        compiled = self._compiled(text)
        try:
            return compiled.render(messages=chat, add_generation_prompt=begins, **values)
        except TemplateError as error:
            raise InvalidUsageError(
                f"the chat template of {self.source} refuses these messages: {error.message:.500}"
            ) from None
        except Exception as error:  # a template's operations may raise any error
            raise InvalidUsageError(
                f"the chat template of {self.source} fails with these messages "
                f"({type(error).__name__}: {error!s:.300}); check the roles and contents that it "
                "expects"
            ) from None

    def _compiled(self, text: str) -> Template:
        from jinja2 import TemplateError

        try:
            return _environment().from_string(text)
        except TemplateError as error:
            raise ModelError(
                f"the chat template of {self.source} is not a valid template ({error.message:.300})"
                ". Download its file again."
            ) from None


def _environment() -> ImmutableSandboxedEnvironment:
    """A jinja2 environment with the settings and functions that transformers provides for
    templates.
    """
    from jinja2 import TemplateError
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """The template tag {% generation %}, which marks an assistant's text for training. It has
        no effect in ark.
        """

        tags = {"generation"}  # noqa: RUF012  as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class PublicNamespace(Namespace):
        """The `namespace` object of jinja2's templates. It refuses to set an attribute whose name
        begins with an underscore.
        """

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace's name begins with an underscore: {name!r}")
            super().__setitem__(name, value)

    def namespace(**values: Any) -> PublicNamespace:
        result = PublicNamespace()
        for name, value in values.items():
            result[name] = value
        return result

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["namespace"] = namespace
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _read(path: Path) -> str:
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read as UTF-8 text ({error}). Download it again."
        ) from None


def _of_settings(settings: Fields) -> dict[str, str]:
    """The templates in tokenizer_config.json."""
    value = settings.get("chat_template")
    if isinstance(value, str):
        return {DEFAULT: value}
    if value is None:
        return {}
    entries = value if isinstance(value, list) else [None]
    texts = {}
    for entry in entries:
        name, text = (
            (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(text, str):
            raise settings.wrong(
                "chat_template", "a text, or a list of objects with name, template"
            )
        texts[name] = text
    return texts


def _schemas(tools: Any) -> list[Any]:
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise InvalidUsageError(f"tools is {tools!r:.60}; give a list of JSON schemas")
    return list(tools)


def _listed(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidUsageError(
            f"the messages are {messages!r:.60}; give a list of objects with role and content"
        )
    if not messages:
        raise InvalidUsageError("a list of no messages was given; give at least one")
    return messages


def _message(number: int, message: Any) -> dict[str, Any]:
    """A copy of a message without null fields. Its reasoning is stored under the names that
    templates read.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidUsageError(
            f"message {number} is {message!r:.60}; expected an object with a role (a string) and "
            "content"
        )
    plain = _plain(f"message {number}", message)
    chosen = {name: value for name, value in plain.items() if value is not None}
    reasoning = next((chosen[name] for name in REASONING if name in chosen), None)
    if reasoning is not None:
        chosen = {"thinking": reasoning, **chosen, "reasoning_content": reasoning}
    return chosen


def _plain(name: str, value: Any) -> Any:
    """A copy of a value that consists of JSON values. Raises InvalidUsageError for other values,
    because a template could call their methods.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: _plain(name, entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(name, entry) for entry in value]
    raise InvalidUsageError(
        f"{name} holds {value!r:.60}; give JSON values only: objects, lists, strings, numbers"
    )


def _mark_end(chat: list[dict[str, Any]], template: str) -> str:
    """Appends END_MARK to the last message's text. Returns the text without the mark."""
    content = chat[-1].get("content")
    if isinstance(content, str) and "content" in template:
        chat[-1]["content"] = content + END_MARK
        return content
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = str(part["text"])
            part["text"] = text + END_MARK
            return text
    raise InvalidUsageError(
        "continue_final_message is set, but the last message has no text to continue"
    )


def _cut_at_mark(rendered: str, text: str) -> str:
    at = rendered.rfind(END_MARK.strip())
    if at < 0 or text.strip() not in rendered:
        raise InvalidUsageError(
            "continue_final_message is set, but the chat template does not render the last "
            "message whole; end the conversation with a message that it renders"
        )
    whole = rendered[at:].startswith(END_MARK)
    return rendered[:at] if whole else rendered[:at].rstrip()
