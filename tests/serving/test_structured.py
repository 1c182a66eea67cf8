"""Structured outputs: texts checked by jsonschema, Python's re and transformers, while other
requests run and masks come late.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from transformers import AutoModelForCausalLM, AutoTokenizer

import ark
from ark.models.build import FULL
from ark.models.checkpoint import Checkpoint
from ark.models.structured import MAX_CHARACTERS
from ark.serving.engine import Engine
from ark.serving.llm import LLM
from ark.serving.types import FinishReason, Request
from tests.checkpoints import make_checkpoint
from tests.serving.requests import Listener
from tests.slow import examples

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

MAX_POSITIONS = 256
RANDOM = {"temperature": 1e5, "max_tokens": None}
"""Options under which all allowed tokens have equal probability. So the texts are arbitrary except
for what the grammar enforces.
"""
PLAIN = ark.SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPT = "The quick brown"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("structured")
    return make_checkpoint(
        directory, layers=1, hidden=32, intermediate=48, head_dim=8, context=MAX_POSITIONS
    )


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with ark.LLM(
        folder, backend="cpu", max_num_seqs=4, max_model_len=MAX_POSITIONS, chunk=16
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def plain_text(llm: LLM) -> str:
    return llm.generate(PROMPT, PLAIN)[0].outputs[0].text


WORDS = st.text('abcxyz "\n\\é', max_size=5)
LEAVES = st.one_of(
    st.builds(
        lambda lo, n: {"type": "integer", "minimum": lo, "maximum": lo + n},
        st.integers(-99, 99),
        st.integers(0, 99),
    ),
    st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(lambda v: {"enum": v}, st.lists(WORDS, min_size=1, max_size=3, unique=True)),
    st.builds(lambda v: {"const": v}, WORDS),
    st.just({"type": "string", "pattern": "^[a-c]{1,3}[0-9]$"}),
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(st.text('abcdé"', min_size=1, max_size=3), inner, max_size=3)

    def closed_object(properties: dict[str, Any], optional: bool) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[: len(properties) - optional],
            "additionalProperties": False,
        }

    return st.builds(closed_object, names, st.booleans())


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(
            lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 2)
        ),
        st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=3,
)


@settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(schema=SCHEMAS, seed=st.integers(0, 1 << 31))
def test_texts_match_random_schemas(llm: LLM, plain_text: str, schema: Any, seed: int) -> None:
    """Texts match random JSON schemas. Requests without a schema, one of them in an earlier row,
    have the same texts as alone.
    """
    form = ark.SamplingParams(seed=seed, n=2, structured_outputs={"json": schema}, **RANDOM)
    before, given, after = llm.generate([PROMPT] * 3, [PLAIN, form, PLAIN])
    assert before.outputs[0].text == after.outputs[0].text == plain_text
    for output in given.outputs:
        if output.finish_reason == "length":  # the context is full
            assert len(given.prompt_token_ids) + len(output.token_ids) == MAX_POSITIONS
        else:
            jsonschema.validate(json.loads(output.text), schema)


@pytest.mark.parametrize(
    "pattern", ["[a-z]{3}-[0-9]{2}", "(yes|no)!?", r"\d+(\.\d{2})? EUR", "é{2,5}", "(ab|cd){10}"]
)
def test_texts_match_expressions(llm: LLM, pattern: str) -> None:
    how = ark.SamplingParams(seed=3, n=4, structured_outputs={"regex": pattern}, **RANDOM)
    for output in llm.generate(PROMPT, how)[0].outputs:
        assert output.finish_reason == "length" or re.fullmatch(pattern, output.text), output.text


def test_grammars_and_any_object(llm: LLM) -> None:
    lark = 'start: "(" start ")" | "x"'
    how = ark.SamplingParams(seed=1, structured_outputs={"grammar": lark}, **RANDOM)
    text = llm.generate(PROMPT, how)[0].outputs[0].text
    assert re.fullmatch(r"(\(*)x(\)*)", text) and text.count("(") == text.count(")")
    how = ark.SamplingParams(seed=1, structured_outputs={"json_object": True}, **RANDOM)
    output = llm.generate(PROMPT, how)[0].outputs[0]
    assert output.finish_reason == "length" or isinstance(json.loads(output.text), dict)


@pytest.mark.parametrize("prompt", [PROMPT, "A tile of a matmul", "lazy dog"])
def test_greedy_text_equals_transformers(llm: LLM, folder: Path, prompt: str) -> None:
    """Texts equal those of transformers' generate, restricted to tokens after which the text can
    still match the grammar.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt).input_ids
    end = model.config.eos_token_id
    words = {i: tokenizer.decode([i]) for i in range(len(tokenizer)) if i != end}
    fitting = {i: len(word) for i, word in words.items() if re.fullmatch("[a-m ]+", word)}

    def allowed(_: int, text: Any) -> list[int]:
        left = 30 - len(tokenizer.decode(text[len(ids) :]))
        return [i for i, length in fitting.items() if length <= left] or [end]

    generated = model.generate(
        torch.tensor([ids]),
        max_new_tokens=64,
        do_sample=False,
        pad_token_id=end,
        prefix_allowed_tokens_fn=allowed,
    )
    wanted = [i for i in generated[0, len(ids) :].tolist() if i != end]
    how = ark.SamplingParams(
        temperature=0, max_tokens=64, structured_outputs={"regex": "[a-m ]{30}"}, logprobs=2
    )
    output = llm.generate(prompt, how)[0].outputs[0]
    assert list(output.token_ids) == wanted and output.finish_reason == "stop"
    assert output.logprobs is not None and len(output.logprobs) == len(wanted)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "(a"}, "structured_outputs.regex .*unclosed group"),
        ({"json": {"type": "text"}}, "structured_outputs.json .*text"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "structured_outputs.json"),
        ({"json": "{"}, "not JSON"),
        ({"json": "[]"}, "which is an object"),
        ({"grammar": "start: other"}, "structured_outputs.grammar"),
        (
            {"json": {"$ref": "#"}},
            r"the grammar rejects the text that was generated so far \(\w+\); use a simpler schema",
        ),
        ({"choice": []}, "none of them empty"),
        ({"regex": ""}, "not empty"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "at most"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({}, "exactly one"),
        ({"jsn": {}}, "ark.StructuredOutputsParams"),
        (5, "ark.StructuredOutputsParams"),
    ],
)
def test_faulty_forms_are_refused(llm: LLM, form: Any, words: str) -> None:
    with pytest.raises(ark.InvalidUsageError, match=words):
        llm.generate(PROMPT, ark.SamplingParams(structured_outputs=form))


@pytest.mark.parametrize("more", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_forms_exclude_min_tokens_and_ignore_eos(more: dict[str, Any]) -> None:
    with pytest.raises(ark.InvalidUsageError, match="beside structured_outputs"):
        ark.SamplingParams(structured_outputs={"regex": "a"}, **more)


def test_grammar_without_a_next_token_ends_only_its_request(llm: LLM, plain_text: str) -> None:
    letters = tuple(i for i in range(3, llm._checkpoint.config.vocab_size))
    how = ark.SamplingParams(structured_outputs={"regex": "a{3}"}, suppress_tokens=letters)
    with pytest.raises(ark.InvalidUsageError, match="no token is left"):
        llm.generate(PROMPT, how)
    assert llm.generate(PROMPT, PLAIN)[0].outputs[0].text == plain_text


class Panic(BaseException):
    """An error as packages in Rust raise it for a panic."""


class Late:
    """A grammar of any text whose masks wait for an event, or raise an error."""

    def __init__(
        self, ready: threading.Event, vocabulary: int, error: BaseException | None = None
    ) -> None:
        self.ready, self.vocabulary, self.error = ready, vocabulary, error

    def begin(self) -> Late:
        return self

    def advance(self, tokens: Sequence[int]) -> np.ndarray | None:
        assert self.ready.wait(60)
        if self.error is not None:
            raise self.error
        mask = np.zeros(self.vocabulary, bool)
        mask[7] = True
        return mask


@pytest.mark.parametrize("chunk", [0, 16])
def test_late_mask_delays_only_its_request(folder: Path, chunk: int) -> None:
    checkpoint = Checkpoint.open(folder)
    ready, listener = threading.Event(), Listener()
    plain = ark.SamplingParams(temperature=0.0, max_tokens=20)
    formed = ark.SamplingParams(max_tokens=3, seed=1, structured_outputs={"regex": "."})
    late = Late(ready, checkpoint.config.vocab_size)
    error = Panic("no mask") if chunk else ValueError("no mask")
    failing = Late(ready, checkpoint.config.vocab_size, error)
    with Engine.open(checkpoint, "cpu", slots=4, context=64, chunk=chunk, sampling=FULL) as engine:
        engine.submit(Request("alone", (5, 6, 7), plain), listener)
        listener.wait("alone")
        engine.submit(Request("late", (5, 6), formed, grammar=late), listener)
        engine.submit(Request("failing", (5, 6), formed, grammar=failing), listener)
        engine.submit(Request("cancelled", (5, 6), formed, grammar=late), listener)
        engine.submit(Request("beside", (5, 6, 7), plain), listener)
        listener.wait("beside")  # it ends although no mask is ready
        assert not listener.tokens.get("late")
        engine.cancel("cancelled")
        listener.wait("cancelled")  # while all others wait for masks
        ready.set()
        listener.wait("late", "failing")
    assert listener.tokens["beside"] == listener.tokens["alone"]
    assert listener.tokens["late"] == [7, 7, 7]
    assert listener.finish["late"] is FinishReason.LENGTH
    assert listener.finish["failing"] is FinishReason.CANCELLED
    assert "no mask" in listener.errors["failing"]


def test_grammar_needs_its_structured_output_field(folder: Path) -> None:
    formed = ark.SamplingParams(structured_outputs={"regex": "."})
    with Engine.open(folder, "cpu", slots=1, context=64) as engine:
        with pytest.raises(ark.InvalidUsageError, match="needs a grammar"):
            engine.submit(Request("a", (5,), formed), print)
        late = Late(threading.Event(), 8)
        with pytest.raises(ark.InvalidUsageError, match="structured_outputs of the sampling"):
            engine.submit(Request("a", (5,), formed, grammar=late), print)
