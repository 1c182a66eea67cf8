"""Tool calls: the prompt as transformers renders it, and answers as the `openai` package reads
them, whole and streamed, in every form that models write.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from ark.models.chat import ChatTemplates
from ark.models.tokenizer import Tokenizer
from ark.serving.http.calls import FORMATS, format_of
from ark.serving.http.schema import Function, Message, Tool
from tests.server.running import NOAH, Running, noah_model, running
from tests.server.stand_in import ScriptedEngine

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}'
    "</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": n, "description": "It does.", "parameters": CITY}}
    for n in ("weather", "time.of-day")
]
USER: list[Any] = [{"role": "user", "content": "How is it?"}]
ASKED: dict[str, Any] = {"model": "noah", "messages": USER, "tools": TOOLS}
BERN = ("weather", {"city": "Bern"})
OSLO = ("weather", {"city": "Oslo", "days": 2, "dry": True, "unit": None, "at": [1.5, '"é']})


@pytest.fixture
def scripted() -> Iterator[ScriptedEngine]:
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture
def server(scripted: ScriptedEngine) -> Iterator[Running]:
    with running(scripted, noah_model(scripted.context, TEMPLATE)) as started:
        yield started


def client_of(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30)


def written(form: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Returns tool calls as text in the syntax of a family of models, written by hand."""
    values = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{value}\n</tool_call>" for value in values)
    if form == "llama3_json":
        return "; ".join(value.replace('"arguments"', '"parameters"') for value in values)
    if form == "mistral":
        return f"[TOOL_CALLS][{', '.join(values)}]"
    if form == "mistral names":
        return "".join(f"[TOOL_CALLS]{name}{json.dumps(given)}" for name, given in calls)
    given = [f"{n}({', '.join(f'{k}={v!r}' for k, v in values.items())})" for n, values in calls]
    return f"[{', '.join(given)}]"


def streamed(client: openai.OpenAI, **asked: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Asks for a streamed answer. Returns its content, tool calls and finish reason, assembled from
    a stream's deltas.
    """
    content, calls, finish = "", {}, ""
    for chunk in client.chat.completions.create(stream=True, **asked):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            known = calls.setdefault(call.index, ["", ""])
            known[0] += call.function.name or ""
            known[1] += call.function.arguments or ""
        finish = choice.finish_reason or finish
    return content, [(name, json.loads(text)) for name, text in calls.values()], finish


def answered(client: openai.OpenAI, **asked: Any) -> tuple[str, list[tuple[str, Any]], str]:
    """Asks for a whole answer. Returns its content, tool calls and finish reason."""
    (choice,) = client.chat.completions.create(**asked).choices
    calls = choice.message.tool_calls or []
    assert len({call.id for call in calls}) == len(calls)
    functions = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    return choice.message.content or "", functions, choice.finish_reason


@pytest.mark.parametrize("special", [False, True], ids=["plain marks", "special marks"])
@pytest.mark.parametrize("form", ["hermes", "llama3_json", "mistral", "mistral names", "pythonic"])
def test_calls_in_every_form(scripted: ScriptedEngine, form: str, special: bool) -> None:
    """Tool calls are parsed whether their markers are plain text or special tokens. Special tokens
    are otherwise left out when an answer's tokens are decoded to text.
    """
    calls = FORMATS[form.split(maxsplit=1)[0]]
    tokenizer = Tokenizer.open(NOAH, vocab_size=2048 + 8)
    if special:
        tokenizer.backend.add_special_tokens([AddedToken(m, special=True) for m in calls.marks])
        tokenizer = Tokenizer(tokenizer.backend, 2048 + 8)
    model = replace(noah_model(2048, TEMPLATE), tokenizer=tokenizer, call_format=calls)
    with running(scripted, model) as server, client_of(server) as client:
        for several in ([BERN], [BERN, OSLO]):
            scripted.script = tokenizer.encode(written(form, *several), framed=False)
            wanted = ("", several, "tool_calls")
            assert answered(client, **ASKED) == wanted
            assert streamed(client, **ASKED) == wanted
        text = "It is fine: a < b, [x] and {y}."
        scripted.script = tokenizer.encode(text, framed=False)
        assert answered(client, **ASKED) == streamed(client, **ASKED) == (text, [], "stop")
        begin, *_ = calls.marks
        for broken in (f"{begin}no call", f"{begin}[]" + calls.end, '{"a": 1}', "[f(1)]", "[g"):
            scripted.script = tokenizer.encode(broken, framed=False)
            content, none, finish = streamed(client, **ASKED)
            assert (content, none, finish) == answered(client, **ASKED) == (broken, [], "stop")


def test_content_before_calls_and_calls_that_were_cut(
    scripted: ScriptedEngine, server: Running
) -> None:
    with client_of(server) as client:
        text = "I look.\n" + written("hermes", BERN, OSLO)
        scripted.script = Tokenizer.open(NOAH).encode(text, framed=False)
        for read in (answered, streamed):
            assert read(client, **ASKED) == ("I look.\n", [BERN, OSLO], "tool_calls")
            content, calls, finish = read(client, max_tokens=20, **ASKED)
            assert text.startswith(content) and not calls and finish == "length"
            content, calls, _ = read(client, tool_choice="none", **ASKED)
            assert content == text and not calls


def test_prompts_are_those_of_transformers(scripted: ScriptedEngine, server: Running) -> None:
    peer = AutoTokenizer.from_pretrained(NOAH)
    call: dict[str, Any] = {"id": "call_1", "type": "function"}
    given = {"name": BERN[0], "arguments": json.dumps(BERN[1])}
    reply = {"role": "tool", "tool_call_id": "call_1", "content": "Sun."}

    def talk(function: dict[str, Any]) -> list[Any]:
        asks = {"role": "assistant", "content": "", "tool_calls": [{**call, "function": function}]}
        return [*USER, asks, reply]

    with client_of(server) as client:
        client.chat.completions.create(**{**ASKED, "messages": talk(given)})
    messages = talk({**given, "arguments": BERN[1]})
    wanted = peer.apply_chat_template(
        messages, tools=TOOLS, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    ids = peer(wanted, add_special_tokens=False).input_ids
    assert list(scripted.submitted[-1].prompt) == ids


def test_answer_may_be_sent_back(scripted: ScriptedEngine, server: Running) -> None:
    scripted.script = Tokenizer.open(NOAH).encode(written("hermes", BERN), framed=False)
    with client_of(server) as client:
        message = client.chat.completions.create(**ASKED).choices[0].message
        for sent in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
            reply = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sun."}
            assert answered(client, **{**ASKED, "messages": [*USER, sent, reply]})[1] == [BERN]


ABSENT = {"type": "object", "properties": {"a": {"$ref": "#/definitions/0"}}}


@pytest.mark.parametrize("given", ["tools", "values", "neither"])
def test_large_tools_do_not_delay_other_clients(given: str, monkeypatch: Any) -> None:
    """Prompts with tools or values of the template, which may be large, are made on another thread
    than the server's.
    """
    threads, render = [], ChatTemplates.render

    def recorded(*args: Any, **values: Any) -> str:
        threads.append(threading.current_thread())
        return render(*args, **values)

    monkeypatch.setattr(ChatTemplates, "render", recorded)
    functions = [Tool("function", Function("f"))] if given == "tools" else None
    values = {"deep": "x"} if given == "values" else None
    tokens = noah_model(2048, TEMPLATE).chat_tokens(
        [Message("user", "How?")], functions, values=values
    )
    assert asyncio.run(tokens)
    assert (threads == [threading.main_thread()]) == (given == "neither")


def tools(**parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tools": tools(definitions=[1], **ABSENT), "tool_choice": "required"}, "tools"),
        ({"tools": tools(definitions=None, **ABSENT), "tool_choice": "required"}, "tools"),
        ({"tools": tools(**ABSENT), "tool_choice": "required"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "a": 1}}]},
            "tools[0].function.a",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"type": "function", "function": {"name": "f", "arguments": "{"}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_refusals(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={**ASKED, **fields}, timeout=20)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{{ tools }} <tool_call>", "hermes"),
        ("{{ tools }} [TOOL_CALLS]", "mistral"),
        ("{{ tools }} <|python_tag|>", "llama3_json"),
        ('{{ tools }} {"name": function name, "parameters": a dictionary}', "llama3_json"),
        ("{{ tools }}", None),
    ],
)
def test_template_shows_the_form(text: str, name: str | None) -> None:
    form = format_of(ChatTemplates("", {"default": text}, {}))
    assert (form and form.name) == name
