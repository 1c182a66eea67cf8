"""LangChain, LiteLLM and guidellm as clients of a server, if they are installed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import make_checkpoint
from tests.server.process import Process
from tests.server.running import NOAH, TEMPLATE, Running, running_checkpoint
from tests.slow import slow

SCHEMA: dict[str, Any] = {
    "title": "Weather",
    "description": "The weather of a city.",
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Oslo"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
QUESTION = "How is it?"
GUIDELLM = shutil.which("guidellm")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = make_checkpoint(tmp_path_factory.mktemp("served"), context=512)
    template = "{% for t in tools or [] %}{{ t.function.name }} {% endfor %}" + TEMPLATE
    (directory / "chat_template.jinja").write_text(template)
    with running_checkpoint(directory) as started:
        yield started


@pytest.fixture(scope="module")
def wanted(server: Running) -> str:
    """Returns the answer that the `openai` package gets."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": QUESTION}],
            max_tokens=12,
            temperature=0,
        )
    return answer.choices[0].message.content or ""


@slow
def test_langchain(server: Running, wanted: str) -> None:
    models = pytest.importorskip("langchain_openai")
    asked: dict[str, Any] = {"base_url": f"{server.url}/v1", "api_key": "none", "model": "small"}
    chat = models.ChatOpenAI(**asked, temperature=0, max_tokens=12)
    assert chat.invoke(QUESTION).content == wanted
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION)) == wanted
    assert asyncio.run(chat.ainvoke(QUESTION)).content == wanted
    pytest.importorskip("llguidance")
    free = models.ChatOpenAI(**asked, temperature=2, seed=3)
    for method in ("json_schema", "function_calling"):
        value = free.with_structured_output(SCHEMA, method=method).invoke(QUESTION)
        assert value["city"] in ("Bern", "Oslo") and 0 <= value["days"] <= 20
    (call,) = free.bind_tools([SCHEMA], tool_choice="Weather").invoke(QUESTION).tool_calls
    assert call["name"] == "Weather" and set(call["args"]) == {"city", "days"}


@slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not installed")
def test_guidellm(tmp_path: Path) -> None:
    """A public load generator against the shipped checkpoint: no request fails."""
    rows = [{"prompt": f"The king said to his {number} servants,"} for number in range(12)]
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with Process(NOAH, "--port", "0") as served:
        words = [f"--backend=kind=openai_http,target={served.url},request_format=/v1/completions"]
        words += ["--profile=kind=concurrent,streams=4", "--constraint=kind=max_requests,count=12"]
        words += [f"--data=kind=json_file,path={prompts}", f"--output=kind=json,path={report}"]
        words += [f"--tokenizer=kind=huggingface_auto,model={NOAH}", "--disable-progress"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run([str(GUIDELLM), "run", *words], check=True, env=environment, timeout=240)
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (12, 0, 0)
    assert all(one["output_tokens"] > 0 for one in benchmark["requests"]["successful"])


@slow
def test_litellm(server: Running, wanted: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked: dict[str, Any] = {
        "model": "openai/small",
        "api_base": f"{server.url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": QUESTION}],
    }
    answer = litellm.completion(**asked, temperature=0, max_tokens=12)
    assert answer.choices[0].message.content == wanted
    stream = litellm.completion(**asked, temperature=0, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted
    pytest.importorskip("llguidance")
    shape = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
    answer = litellm.completion(**asked, temperature=2, seed=3, response_format=shape)
    assert set(json.loads(answer.choices[0].message.content)) == {"city", "days"}
