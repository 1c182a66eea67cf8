"""docs/serve.md: its requests and its program are answered by a server of examples/noah."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from ark.serving.http.run import Options
from tests.pages import DOCS, python_blocks
from tests.server.running import NOAH, Running, running_checkpoint

PAGE = (DOCS / "serve.md").read_text()
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.S)
CURLS = [part for block in BLOCKS for part in re.findall(r"^curl .*?[^\\]$", block, re.S | re.M)]
ADDRESS = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running_checkpoint(NOAH, Options(keys=("secret",)), "noah") as started:
        yield started


def asked(command: str, url: str) -> dict[str, Any]:
    """Sends the request of a curl command to a server and returns its answer."""
    words = shlex.split(command.replace("\\\n", " "))
    headers = dict(w.split(": ") for o, w in itertools.pairwise(words) if o == "-H")
    data = [w for o, w in itertools.pairwise(words) if o == "-d"]
    place = words[1].replace(ADDRESS, url)
    headers.setdefault("Authorization", "Bearer secret")
    body = {"content": data[0]} if data else {}
    answer = httpx.request("POST" if data else "GET", place, headers=headers, timeout=60, **body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_requests_of_the_page_are_answered(server: Running) -> None:
    pytest.importorskip("llguidance")
    plain, structured, models = CURLS
    assert asked(plain, server.url)["usage"]["completion_tokens"] == 32
    text = asked(structured, server.url)["choices"][0]["text"]
    assert re.fullmatch(r"[a-z]{3,9}!", text)
    assert [model["id"] for model in asked(models, server.url)["data"]] == ["noah"]


def test_program_of_the_page_prints_a_text(
    server: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = python_blocks("serve.md")
    changed = program.replace(ADDRESS, server.url).replace('"none"', '"secret"')
    assert changed.count(server.url) == changed.count('"secret"') == 1
    exec(changed, {})
    assert len(capsys.readouterr().out.split()) > 5


def test_error_of_the_page_is_the_servers(server: Running) -> None:
    (shown,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)
    wanted = json.loads(shown)["error"]
    answer = httpx.post(
        f"{server.url}/v1/completions",
        headers={"Authorization": "Bearer secret"},
        json={"prompt": "The king said to his servants, Go now", "max_tokens": 5000},
        timeout=60,
    )
    error = answer.json()["error"]
    begin, count = (
        re.sub(r"has \d+ tokens", "has N tokens", e["message"]) for e in (wanted, error)
    )
    assert count.startswith(begin.removesuffix(" ..."))
    assert {key: error[key] for key in ("type", "param", "code")} == {
        key: wanted[key] for key in ("type", "param", "code")
    }
