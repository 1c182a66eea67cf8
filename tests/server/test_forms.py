"""Structured outputs over HTTP, with a checkpoint of random weights: sent by the `openai` package
and checked by jsonschema. Also tests the ranges of a request's numeric fields, and that invalid
fields are refused with the error messages of ark's Python interface.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ark.errors import InvalidUsageError
from ark.models.sampling import SamplingParams
from ark.models.tokenizer import Tokenizer
from ark.serving.grammar import Grammars
from ark.serving.http.forms import call_form
from ark.serving.http.schema import Function, Tool
from tests.checkpoints import make_checkpoint
from tests.server.running import NOAH, TEMPLATE, Running, running_checkpoint

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

USER: Any = [{"role": "user", "content": "How is it?"}]
RANDOM: dict[str, Any] = {"model": "small", "temperature": 100, "seed": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "at": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days", "at"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = make_checkpoint(tmp_path_factory.mktemp("formed"), context=512)
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    with running_checkpoint(directory) as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as opened:
        yield opened


def test_response_formats(client: openai.OpenAI) -> None:
    shape: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}
    answer = client.chat.completions.create(messages=USER, response_format=shape, n=3, **RANDOM)
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
    stream = client.chat.completions.create(
        messages=USER, response_format=shape, stream=True, **RANDOM
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    answer = client.chat.completions.create(
        messages=USER, response_format={"type": "json_object"}, max_tokens=400, **RANDOM
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length" or json.loads(choice.message.content or "") is not None


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" ("b" | "c") "d"'}, "a(b|c)d"),
        ({"guided_json": '{"enum": [12, "x"]}'}, '12|"x"'),
        ({"structured_outputs": {"regex": "a{2,4}"}}, "a{2,4}"),
        ({"structured_outputs": {"choice": ["1", "2"]}}, "1|2"),
    ],
)
def test_vllms_fields(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        prompt=["The", "lazy dog"], max_tokens=64, extra_body=fields, **RANDOM
    )
    for choice in answer.choices:
        assert re.fullmatch(pattern, choice.text) and choice.finish_reason == "stop"


def test_required_tool(client: openai.OpenAI) -> None:
    def calls(**asked: Any) -> list[Any]:
        answer = client.chat.completions.create(messages=USER, tools=TOOLS, **RANDOM, **asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        return list(choice.message.tool_calls or [])

    named = {"type": "function", "function": {"name": "weather"}}
    (call,) = calls(tool_choice=named)
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    (call,) = calls(tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    assert call.function.name in ("weather", "now")
    if call.function.name == "weather":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    answer = client.chat.completions.create(
        messages=USER, tools=TOOLS, tool_choice=named, max_tokens=2, **RANDOM
    )
    assert answer.choices[0].finish_reason == "length"


def node(value: dict[str, Any], reference: str, **others: Any) -> dict[str, Any]:
    """Returns the schema of a list whose elements contain the next one. reference: to the value."""
    return {
        "type": "object",
        "properties": {"v": {"$ref": reference}, "next": {"$ref": "#"}, "w": value},
        "required": ["v"],
        "additionalProperties": False,
        **others,
    }


DIGIT: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": 9}
TRUTH: dict[str, Any] = {"type": "boolean"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
REFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "definitions": (
        node(DIGIT, "#/$defs/value", **{"$defs": {"value": DIGIT}}),
        node(TRUTH, "#/$defs/value", **{"$defs": {"value": TRUTH}}),
    ),
    "properties": (node(DIGIT, "#/properties/w"), node(TRUTH, "#/properties/w")),
    "anchors": (
        node({**DIGIT, "$anchor": "value"}, "#value"),
        node({**TRUTH, "$anchor": "value"}, "#value"),
    ),
    "identifiers": (
        node(DIGIT, "https://here/it#/properties/w", **{"$id": "https://here/it"}),
        node(TRUTH, "#/properties/w", **{"$id": "https://here/it"}),
    ),
    "a reference beside its definitions, draft 7": (
        {"$ref": "#/$defs/it", "$defs": {"it": node(DIGIT, "#/$defs/it/properties/w")}, **DRAFT_7},
        {"$ref": "#/$defs/it", "$defs": {"it": node(TRUTH, "#/$defs/it/properties/w")}, **DRAFT_7},
    ),
}


@pytest.mark.parametrize("schemas", REFERENCES.values(), ids=[*REFERENCES])
def test_references_within_the_parameters_of_tools(schemas: Any) -> None:
    """References in a tool's schema begin at that schema, whichever tools stand beside it."""
    functions = [Function(f"f{i}", parameters=schema) for i, schema in enumerate(schemas)]
    form = call_form([Tool("function", function) for function in functions], None, True)
    tokenizer = Tokenizer.open(NOAH, vocab_size=2048)
    grammar = Grammars(tokenizer, 2048, [1]).grammar(form.params)

    def accepted(*calls: tuple[str, Any]) -> bool:
        text = json.dumps([{"name": name, "parameters": given} for name, given in calls])
        guide = grammar.begin()
        mask = guide.advance(())
        for token in tokenizer.encode(text, framed=False):
            if mask is None or not mask[token]:
                return False
            mask = guide.advance([token])
        return mask is None or bool(mask[1])

    digits, truths = {"v": 1, "next": {"v": 2}}, {"v": True, "next": {"v": False}}
    assert accepted(("f0", digits), ("f1", truths))
    for name, wrong in (("f0", truths), ("f1", digits)):
        assert not accepted((name, wrong)) and not accepted((name, wrong["next"]))
    assert not accepted(("f0", {"v": 1, "next": {"v": True}}))
    assert not accepted(("f0", {"v": 1, "next": [{"name": "f0", "parameters": {"v": 1}}]}))


def test_required_tools_with_references(client: openai.OpenAI) -> None:
    schemas = REFERENCES["definitions"]
    named = [{"name": f"f{i}", "parameters": schema} for i, schema in enumerate(schemas)]
    answer = client.chat.completions.create(
        messages=USER,
        tools=[{"type": "function", "function": each} for each in named],  # type: ignore[misc]
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=300,
        n=8,
        **RANDOM,
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "tool_calls"]
    calls = [call.function for choice in ended for call in choice.message.tool_calls or ()]
    assert {call.name for call in calls} == {"f0", "f1"}
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), schemas[int(call.name[1])])


VALUES: dict[str, list[Any]] = {
    "temperature": [0, 1e-5, 1e-6, 1, 1e5, 1.1e5, -1],
    "top_p": [0, 1e-46, 1e-9, 1, 1.1],
    "top_k": [-2, -1, 0, 1, 1 << 31],
    "min_p": [-0.1, 0, 1, 1.1],
    "typical_p": [0, 1e-46, 0.5, 1, 1.1],
    "repetition_penalty": [0, 1e-3, 1e3, 1001],
    "presence_penalty": [-2, 2, 2.1],
    "frequency_penalty": [-2.1, -2, 2],
    "logit_bias": [{5: -100}, {5: 100.5}, {}],
    "seed": [-(1 << 63), -(1 << 63) - 1, (1 << 64) - 1, 1 << 64],
    "n": [0, 1, 129],
    "max_tokens": [0, 1],
    "min_tokens": [-1, 0, 1, 3],
    "stop": ["", "a", [], ["a"] * 129, "a" * 1001],
    "stop_token_ids": [[], [5]],
    "logprobs": [-1, 0, 5, 21],
}


@pytest.mark.parametrize("field", VALUES)
def test_ranges_are_those_of_python(server: Running, field: str) -> None:
    for value in VALUES[field]:
        fields = {"max_tokens": 1, field: value}
        body = {"prompt": "The", "temperature": 0, **fields}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        try:
            SamplingParams(**fields)
        except InvalidUsageError as error:
            assert answer.status_code == 400, (field, value)
            assert answer.json()["error"]["message"] == str(error)
            assert answer.json()["error"]["param"] == field
        else:
            assert answer.status_code == 200, (field, value, answer.text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"n": "3"}, "the field 'n' is a string; it must be a whole number"),
        ({"n": 2.5}, "the field 'n' is a number; it must be a whole number"),
        ({"stop": 3}, "the field 'stop' is a whole number; it must be a string or a list"),
        ({"prompt": None}, "the field 'prompt' is null; it must be a string or a list"),
        ({"stop_token_ids": [-1]}, "the field 'stop_token_ids[0]' must be at least 0"),
        (
            {"logit_bias": {"a": 1}},
            "a key of the field 'logit_bias' is a string; it must be a whole number",
        ),
        ({"messages": []}, "the field 'messages' must have at least 1 entries"),
        (
            {"messages": USER, "tool_choice": "x"},
            "the field 'tool_choice' is 'x'; it must be "
            "none, auto, required or an object that names a function",
        ),
        (
            {"messages": [{"role": "user", "text": "a"}]},
            "the field 'messages[0].text' is not supported; omit it",
        ),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "the field 'stream_options.usage' is not supported; omit it",
        ),
        ([1], "the body is a list; it must be an object"),
        ("{", "the body is not valid JSON in UTF-8"),
        ('{"prompt": "a" "b"}', "the body is not valid JSON in UTF-8 (at byte 15)"),
        ('{"prompt": "a", "n": 1e400}', "the field 'n'"),
    ],
)
def test_error_messages_are_in_plain_words(server: Running, body: Any, message: str) -> None:
    route = "chat/completions" if "messages" in body else "completions"
    if isinstance(body, dict) and route == "completions":
        body = {"prompt": "The", **body}
    text = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/{route}", content=text, headers=headers, timeout=20)
    given = answer.json()["error"]["message"]
    assert answer.status_code == 400 and given.startswith(message), given
    assert not {"`", "Expected", "array", "int,"} & set(given.split()) and "`" not in given
