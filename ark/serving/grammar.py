"""Grammars over token ids, implemented with the llguidance package. For each text they compute
which tokens may follow so that the text can still reach the required form. `ark.LLM` and the server
create them for requests with structured outputs.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from ark.errors import InvalidUsageError, SystemError, UnsupportedError
from ark.models.structured import StructuredOutputsParams
from ark.models.tokenizer import Tokenizer

SPACES = r"[\x20\x0A\x0D\x09]{1,20}"
"""The white space allowed between the parts of JSON. Its length is bounded, because the model could
otherwise write spaces without end.
"""


class TextGuide:
    """The grammar's state for one text: which tokens may come next. It implements
    ark.serving.types.Guide.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        """Appends tokens to the text. Returns the mask of the tokens that may follow, or None if
        the text is complete.
        """
        if tokens and not self._matcher.consume_tokens(list(tokens)):
            raise self._failed()
        if self._matcher.is_error():
            raise self._failed()
        if self._matcher.is_stopped():
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._failed()
        allowed = np.zeros(self._vocabulary, bool)
        known = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        allowed[: known.size] = known
        return allowed

    def _failed(self) -> InvalidUsageError:
        cause = one_line(self._matcher.get_error().partition("<state>")[0])  # not the parser's dump
        return InvalidUsageError(
            f"the grammar rejects the text that was generated so far ({cause}); use a simpler "
            "schema"
        )


class TextGrammar:
    """A compiled grammar, which any number of texts may use. It implements
    ark.serving.types.Grammar.
    """

    def __init__(self, matcher: Any, vocabulary: int) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary

    def begin(self) -> TextGuide:
        """The state of a new text in the grammar, before its first token."""
        return TextGuide(self._matcher.deep_copy(), self._vocabulary)


class Grammars:
    """Creates grammars for a tokenizer. vocabulary: the number of tokens of the model. ends: the
    ids of the tokens that end a text.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, ends: Sequence[int]) -> None:
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        self._ends = sorted(end for end in ends if 0 <= end < vocabulary)
        self._tokenizer_of_grammars: Any = None
        self._lock = threading.Lock()

    def grammar(self, form: StructuredOutputsParams) -> TextGrammar:
        """Compiles the grammar of a form (a JSON schema, regular expression, list of choices or
        grammar). This may take as long as decoding several tokens. Raises InvalidUsageError if the
        form is not valid or llguidance does not support it, and SystemError if that package is not
        installed.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise SystemError(
                "structured outputs need llguidance, which the extra `structured` installs: "
                "pip install 'ark-gpu[structured]'"
            )
        import llguidance

        known = self._known(llguidance)
        name, text = _source(llguidance.LLMatcher, form)
        matcher = llguidance.LLMatcher(known, text, log_level=0)
        if matcher.is_error():
            raise InvalidUsageError(
                f"structured_outputs.{name} is not valid or not supported: "
                f"{one_line(matcher.get_error())}"
            )
        return TextGrammar(matcher, self._vocabulary)

    def _known(self, llguidance: Any) -> Any:
        """The tokenizer in llguidance's form, created at the first call and cached."""
        with self._lock:
            if self._tokenizer_of_grammars is None:
                text = self._tokenizer.backend.to_str()
                try:
                    self._tokenizer_of_grammars = llguidance.LLTokenizer(
                        text, n_vocab=self._vocabulary, eos_token=self._ends or None
                    )
                except Exception as error:  # the package raises many kinds of errors
                    raise UnsupportedError(
                        "structured outputs are not supported with this checkpoint's tokenizer: "
                        f"{one_line(str(error))}"
                    ) from None
            return self._tokenizer_of_grammars


def _source(matcher: Any, form: StructuredOutputsParams) -> tuple[str, str]:
    """Returns the name of the field of `form` that is set (such as "json"), and its value as a
    grammar in llguidance's syntax.
    """
    name = next(f.name for f in fields(form) if getattr(form, f.name) is not None)
    try:
        return name, _converted(matcher, form)
    except ValueError as error:
        raise InvalidUsageError(
            f"structured_outputs.{name} is not valid: {one_line(str(error))}"
        ) from None


def _converted(matcher: Any, form: StructuredOutputsParams) -> str:
    """A form's value as a grammar in llguidance's syntax. Raises ValueError if it has none."""
    spaces = {"whitespace_flexible": True, "whitespace_pattern": SPACES}
    if form.json is not None:
        return str(matcher.grammar_from_json_schema(form.json, overrides=spaces))
    if form.json_object:
        schema = json.dumps({"type": "object"})
        return str(matcher.grammar_from_json_schema(schema, overrides=spaces))
    if form.regex is not None:
        return str(matcher.grammar_from_regex(form.regex))
    if form.choice is not None:
        texts = " | ".join(json.dumps(text) for text in form.choice)
        return str(matcher.grammar_from_lark(f"start: {texts}"))
    from llguidance import grammar_from

    return str(grammar_from("grammar", str(form.grammar)))


def one_line(text: str) -> str:
    """The message of another package on one line, shortened so that it fits in a sentence."""
    return " ".join(text.split())[:300] or "no cause was given"
