"""Every route's answers and refusals, on an engine without a model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ark.errors import GpuError
from ark.serving.http.app import Limits
from ark.serving.http.run import Options, bound, serve
from tests.server.running import Running, noah_model, running, until
from tests.server.stand_in import CountingEngine

TEXT = {"prompt": "The king", "max_tokens": 4}
TALK: dict[str, Any] = {"messages": [{"role": "user", "content": "Who?"}]}


def post(server: Running, path: str, content: Any, **headers: str) -> httpx.Response:
    return httpx.post(server.url + path, json=content, headers=headers, timeout=20)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [2048]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[3], [4096]]}, "prompt[1]"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": "king " * 200}, "prompt"),
        ({"max_tokens": 127}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": True}, "n"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 129}, "stop"),
        ({"seed": 1 << 64}, "seed"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"2048": 1}}, "logit_bias"),
        ({"stop_token_ids": [2048]}, "stop_token_ids"),
        ({"logprobs": 2}, "logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "."}, "suffix"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "text", "xml": 1}}, "response_format.xml"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options.usage"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"items":' * 400 + "{}" + "}" * 400}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json, guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_refused_completions(server: Running, fields: dict[str, Any], param: str) -> None:
    answer = post(server, "/v1/completions", {**TEXT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "contents": "a"}]}, "messages[0].contents"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens"),
        ({"max_completion_tokens": 1000}, "messages"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_refused_chats(server: Running, fields: dict[str, Any], param: str | None) -> None:
    answer = post(server, "/v1/chat/completions", {**TALK, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == (param or "messages[0].content")


def test_forms_without_llguidance(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    answer = post(server, "/v1/completions", {**TEXT, "guided_regex": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "guided_regex")
    assert "pip install 'ark-gpu[structured]'" in error["message"]


def test_null_is_the_default(server: Running) -> None:
    nulls = dict.fromkeys(("n", "stop", "seed", "temperature", "logprobs", "stream", "user"))
    assert post(server, "/v1/completions", {**TEXT, **nulls}).status_code == 200


def test_other_refusals(server: Running) -> None:
    assert httpx.get(server.url + "/v1/other").status_code == 404
    assert httpx.get(server.url + "/v1/completions").status_code == 405
    plain = httpx.post(server.url + "/v1/completions", content=b"{}")
    assert plain.status_code == 415
    other = post(server, "/v1/completions", {**TEXT, "model": "other"})
    assert (other.status_code, other.json()["error"]["code"]) == (404, "model_not_found")
    for answer in (plain, other, httpx.get(server.url + "/v1/other")):
        assert answer.json()["error"]["message"]


def test_many_levels_of_objects(server: Running) -> None:
    values: dict[str, Any] = {}
    for _ in range(900):
        values = {"a": values}
    answer = post(server, "/v1/chat/completions", {**TALK, "chat_template_kwargs": values})
    assert answer.status_code == 400 and "levels" in answer.json()["error"]["message"]


def test_without_a_chat_template(engine: CountingEngine) -> None:
    with running(engine, noah_model(128, template=None)) as server:
        answer = post(server, "/v1/chat/completions", TALK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_chat_template")


def test_models(server: Running) -> None:
    cards = httpx.get(server.url + "/v1/models").json()
    assert [(c["id"], c["max_model_len"]) for c in cards["data"]] == [("noah", 128)]
    assert httpx.get(server.url + "/v1/models/noah").json() == cards["data"][0]
    assert httpx.get(server.url + "/v1/models/other").status_code == 404


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    text = "The king saw é and \U0001f600."
    tokens = post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(server, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    framed = post(server, "/tokenize", {"prompt": text}).json()["tokens"]
    assert framed == [0, *tokens["tokens"]]
    talk = post(server, "/tokenize", TALK).json()["tokens"]
    prompt = post(server, "/detokenize", {"tokens": talk}).json()["prompt"]
    assert prompt == "user: Who?\nassistant:"


def test_stop_strings_seeds_and_choices(server: Running, engine: CountingEngine) -> None:
    # The stand-in engine generates characters in the order of their codes.
    asked = {"prompt": [2], "max_tokens": 50, "stop": ["+,", "())"], "n": 3, "seed": 5}
    answer = post(server, "/v1/completions", asked).json()
    assert [c["text"] for c in answer["choices"]] == ["$%&'()*"] * 3
    assert {c["finish_reason"] for c in answer["choices"]} == {"stop"}
    assert [r.sampling.seed for r in engine.submitted] == [5, 6, 7]
    until(lambda: engine.stats().running == 0, "the slots are free")


def test_stop_token_ends_the_text_before_it(server: Running) -> None:
    asked = {"prompt": [2], "max_tokens": 50, "stop_token_ids": [9]}
    answer = post(server, "/v1/completions", asked).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("$%&'", "stop")
    assert answer["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_usage_in_every_chunk(server: Running, route: str) -> None:
    """With `stream_options.continuous_usage_stats` every chunk has token counts, which increase up
    to those of the last chunk. Without it only the last chunk has them.
    """
    content = (
        {"prompt": "The"}
        if route == "completions"
        else {"messages": [{"role": "user", "content": "a"}]}
    )
    for continuous in (True, False):
        options = {"include_usage": True, "continuous_usage_stats": continuous}
        asked = {**content, "max_tokens": 6, "stream": True, "stream_options": options}
        lines = httpx.post(f"{server.url}/v1/{route}", json=asked).text.splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        usages = [event.get("usage") for event in events]
        assert usages[-1]["completion_tokens"] == 6
        if continuous:
            counts = [usage["completion_tokens"] for usage in usages]
            assert counts == sorted(counts) and {u["prompt_tokens"] for u in usages} == {
                usages[-1]["prompt_tokens"]
            }
        else:
            assert not any(usages[:-1])


def test_several_prompts_and_echo(server: Running) -> None:
    asked = {"prompt": ["one", "two"], "max_tokens": 2, "echo": True, "n": 2}
    choices = post(server, "/v1/completions", asked).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert [c["text"][:3] for c in choices] == ["one", "one", "two", "two"]


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(server: Running, engine: CountingEngine, stream: bool) -> None:
    """Log probabilities in answers have the form of the `openai` package's types."""
    engine.has_logprobs = True
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        texts: Any = client.completions.create(
            model="noah", prompt=[2], max_tokens=3, logprobs=2, stream=stream
        )
        pieces = [one.choices[0] for one in (texts if stream else [texts])]
        logprobs = [piece.logprobs for piece in pieces]
        assert [t for entry in logprobs for t in entry.tokens] == ["$", "%", "&"]
        assert [p for entry in logprobs for p in entry.token_logprobs] == [-0.5] * 3
        assert [t for entry in logprobs for t in entry.text_offset] == [0, 1, 2]
        assert logprobs[0].top_logprobs[0] == {"$": -0.5, "%": -1.5}
        chats: Any = client.chat.completions.create(
            model="noah",
            messages=[{"role": "user", "content": "Who?"}],
            max_tokens=3,
            logprobs=True,
            top_logprobs=1,
            stream=stream,
        )
        pieces = [one.choices[0] for one in (chats if stream else [chats])]
        content = [e for p in pieces if p.logprobs for e in p.logprobs.content or []]
        text = "".join((p.delta if stream else p.message).content or "" for p in pieces)
        assert "".join(entry.token for entry in content) == text and len(text) == 3
        assert [bytes(entry.bytes).decode() for entry in content] == list(text)
        assert [entry.top_logprobs[0].token for entry in content] == list(text)


def test_api_keys_are_required(engine: CountingEngine) -> None:
    with running(engine, noah_model(128), Options(keys=("first", "second"))) as server:
        assert post(server, "/v1/completions", TEXT).status_code == 401
        for key, status in (("first", 200), ("second", 200), ("third", 401), ("firs", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert post(server, "/v1/completions", TEXT, **headers).status_code == status
        assert httpx.get(server.url + "/stats").status_code == 401
        assert httpx.get(server.url + "/health").status_code == 200


def test_cross_origin_requests_need_an_option(engine: CountingEngine) -> None:
    ask = {"origin": "https://here.test", "access-control-request-method": "POST"}
    options = Options(keys=("key",), origins=("https://here.test",))
    with running(engine, noah_model(128), options) as server:
        url = server.url + "/v1/completions"
        allowed = httpx.options(url, headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://here.test"
        other = httpx.options(url, headers={**ask, "origin": "https://there.test"})
        assert "access-control-allow-origin" not in other.headers


def test_defaults_of_the_checkpoint(engine: CountingEngine) -> None:
    model = replace(noah_model(128), defaults={"temperature": 0.25, "top_k": 9, "max_tokens": 7})
    with running(engine, model) as server:
        post(server, "/v1/completions", {"prompt": "a"})
        post(server, "/v1/completions", {"prompt": "a", "temperature": 2, "max_tokens": 3})
        post(server, "/v1/chat/completions", {**TALK, "top_k": -1})
    fields = [
        (r.sampling.temperature, r.sampling.top_k, r.sampling.max_tokens) for r in engine.submitted
    ]
    assert fields == [(0.25, 9, 7), (2, 9, 3), (0.25, 0, 7)]


def test_full_queue(engine: CountingEngine) -> None:
    engine.step_s = 0.01
    with running(engine, noah_model(128), Options(limits=Limits(queue=2))) as server:
        asked = {**TEXT, "stream": True, "n": 6, "max_tokens": 100}
        with httpx.stream("POST", server.url + "/v1/completions", json=asked):
            refused = post(server, "/v1/completions", TEXT)
            assert refused.status_code == 503 and refused.headers["retry-after"] == "1"
            assert refused.json()["error"]["code"] == "queue_full"
        until(lambda: not server.service.dispatcher.jobs, "the slots are free")
        assert post(server, "/v1/completions", TEXT).status_code == 200
        assert post(server, "/v1/completions", {**TEXT, "n": 7}).status_code == 400


def test_limit_of_time(engine: CountingEngine) -> None:
    engine.step_s = 0.05
    with running(engine, noah_model(128), Options(limits=Limits(request_s=0.3))) as server:
        answer = post(server, "/v1/completions", {**TEXT, "max_tokens": 100})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        streamed = post(server, "/v1/completions", {**TEXT, "max_tokens": 100, "stream": True})
        assert '"code":"timeout"' in streamed.text
        until(lambda: engine.stats().running == 0, "the slots are free")


def test_engine_that_fails(server: Running, engine: CountingEngine) -> None:
    """Until a server whose engine has failed has ended, /health answers 503."""
    server.service.on_failure = lambda: None
    engine.fail = "the device reported a fault"
    answer = post(server, "/v1/completions", TEXT)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (500, "engine_failed")
    assert "the device" in error["message"]
    until(lambda: server.service.failure, "the server knows of the failure")
    assert httpx.get(server.url + "/health").status_code == 503


def test_failure_without_requests_ends_the_server(engine: CountingEngine) -> None:
    def fail() -> None:
        engine.on_failure("the device has gone")

    listener = bound("127.0.0.1", 0)
    with pytest.raises(GpuError, match="the device has gone; the server has ended, start it"):
        asyncio.run(serve(engine, noah_model(128), Options(), listener, fail))


def test_shutdown_lets_answers_complete(engine: CountingEngine) -> None:
    engine.step_s = 0.01
    with running(engine, noah_model(128)) as server:
        asked = {**TEXT, "stream": True, "max_tokens": 50}
        with httpx.stream("POST", server.url + "/v1/completions", json=asked, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.end()
            text = "".join(lines)
        assert '"finish_reason":"length"' in text and text.endswith("[DONE]")


def test_shutdown_has_a_time_limit(engine: CountingEngine) -> None:
    engine.step_s = 0.05
    with running(engine, noah_model(128), Options(drain_s=0.3)) as server:
        asked = {**TEXT, "stream": True, "max_tokens": 120}
        with httpx.stream("POST", server.url + "/v1/completions", json=asked, timeout=20) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.end()
            text = "".join(lines)
        assert '"code":"shutdown"' in text
    assert engine.stats().running == 0


def test_metrics(server: Running) -> None:
    for _ in range(3):
        post(server, "/v1/completions", {**TEXT, "n": 2})
    text = httpx.get(server.url + "/metrics").text
    values = {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["vllm:generation_tokens_total", ""] == 24
    assert values["vllm:request_success_total", "length"] == 6
    assert values["vllm:time_to_first_token_seconds_count", ""] == 6
    assert values["vllm:inter_token_latency_seconds_count", ""] == 18
    assert values["vllm:num_requests_running", ""] == 0
    stats = httpx.get(server.url + "/stats").json()
    assert stats["slots"] == 4 and stats["generated_tokens"] == 24
    ages = [age for lane in stats["timeline"] for age in lane]
    assert [len(lane) for lane in stats["timeline"]] == [4] * 6
    assert all(0 <= age <= stats["window_s"] for age in ages)
    launch = stats["launches"][-1]
    assert launch["age_s"] >= 0 and "begin_s" not in launch
    assert (launch["form"], launch["iterations"], launch["time_us"]) == (4, 1, 1000)
    assert stats["tokens_per_s"] > 0 and stats["time_to_first_token_s"] > 0
