"""Malformed requests, idle connections, and answers that the client does not read."""

from __future__ import annotations

import json
import random
import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from ark.serving.engine import Engine
from ark.serving.http import connection
from ark.serving.http.app import Limits
from ark.serving.http.run import Options
from ark.serving.rows import NO_TOKEN
from tests.checkpoints import make_checkpoint
from tests.server.raw import Raw, request
from tests.server.running import Running, noah_model, running, running_checkpoint, until
from tests.server.soak import is_error, mutated
from tests.server.stand_in import CountingEngine
from tests.slow import examples

LONG_ANSWER_TOKENS = 3000
GOOD = {"prompt": "The king", "max_tokens": 4}


def body(**fields: Any) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def test_pipelined_requests_are_answered_in_order(server: Running) -> None:
    with Raw(server.port) as client:
        client.send(request(body(max_tokens=2)) + request(body(max_tokens=3)))
        counts = [client.response()[1]["usage"]["completion_tokens"] for _ in range(2)]
    assert counts == [2, 3]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(server: Running) -> None:
    """The curl commands of docs/serve.md get a whole answer and a stream."""
    page = Path(__file__).resolve().parents[2] / "docs/serve.md"
    pattern = r"^curl http://\S+:8000/v1/completions .*\\\n.*$"
    command = re.findall(pattern, page.read_text(), re.M)[0]
    command = command.replace("http://127.0.0.1:8000", server.url)

    def answer(line: str) -> str:
        return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout

    whole = json.loads(answer(command.replace("curl", "curl -s", 1)))
    streamed = command.replace("curl", "curl -sN", 1).replace("}'", ', "stream": true}\'')
    events = [json.loads(line[6:]) for line in answer(streamed).splitlines() if "{" in line]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text == whole["choices"][0]["text"] != ""


def test_chunked_bodies(server: Running) -> None:
    text = body()
    head = request(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (text[:7], text[7:]))
    with Raw(server.port) as client:
        client.send(head + chunks + b"0\r\n\r\n")
        assert client.response()[0] == 200
    for faulty in (b"zz\r\n", b"2\r\n{}xx0\r\n\r\n", b"-1\r\n", b"2;\n{}\r\n"):
        with Raw(server.port) as client:
            client.send(head + faulty)
            assert client.response()[0] == 400 and client.ended()


CHUNKED_LENGTH = "transfer-encoding: chunked\r\ncontent-length: "


@pytest.mark.parametrize(
    ("lengths", "version"),
    [
        (CHUNKED_LENGTH + "4", "1.1"),
        (CHUNKED_LENGTH + "0", "1.1"),
        ("Content-Length: 4\r\nTransfer-Encoding: CHUNKED", "1.1"),
        ("transfer-encoding: chunked", "1.0"),
        ("content-length: 4\r\ncontent-length: 5", "1.1"),
        ("content-length: 4, 5", "1.1"),
        ("content-length: +4", "1.1"),
        ("content-length : 4", "1.1"),
        ("transfer-encoding: chunked\r\ntransfer-encoding: chunked", "1.1"),
        ("transfer-encoding: chunked, identity", "1.1"),
        ("transfer-encoding: xchunked", "1.1"),
        ("transfer-encoding: \x0bchunked", "1.1"),
        ("transfer-encoding\t: chunked", "1.1"),
    ],
)
def test_ambiguous_lengths_are_refused(
    server: Running, engine: CountingEngine, lengths: str, version: str
) -> None:
    """Proxies and servers may disagree on where such a request ends, so that a part of its body
    becomes the next client's request (request smuggling). It gets 400, nothing after it is
    answered, and the connection ends.
    """
    text = body()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: a\r\ncontent-type: application/json"
    chunks = b"%x\r\n%s\r\n0\r\n\r\n" % (len(text), text)
    with Raw(server.port) as client:
        client.send(f"{head}\r\n{lengths}\r\n\r\n".encode() + chunks + request(text))
        status, answer = client.response()
        assert status == 400 and is_error(answer)
        assert client.line() == b"" and not engine.submitted


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"POST /v1/completions\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000,
    ],
)
def test_bytes_that_are_not_http(server: Running, data: bytes) -> None:
    with Raw(server.port) as client:
        client.send(data)
        status, answer = client.response()
        assert status == 400 and is_error(answer)
        assert client.ended()


def test_invalid_utf8(server: Running) -> None:
    with Raw(server.port) as client:
        client.send(request(b'{"prompt": "\xff\xfe"}'))
        status, answer = client.response()
    assert status == 400 and is_error(answer) and "UTF-8" in answer["error"]["message"]


def test_prompt_of_ten_megabytes(server: Running) -> None:
    status, answer = _whole(server, body(prompt="king " * 2_000_000))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


def test_more_prompts_than_may_wait(server: Running) -> None:
    """A request with more prompts than may wait is refused before any of them is tokenised."""
    status, answer = _whole(server, body(prompt=["king"] * 1_000_000))
    assert status == 400 and "1000000 choices" in answer["error"]["message"]


def test_body_beyond_the_limit(engine: CountingEngine) -> None:
    options = Options(limits=Limits(body_bytes=1000))
    with running(engine, noah_model(128), options) as server:
        assert _whole(server, body(prompt="k" * 1000))[0] == 413
        chunked = request(b"", transfer_encoding="chunked").replace(b"content-length: 0\r\n", b"")
        with Raw(server.port) as client:
            client.send(chunked + b"3ff\r\n" + b" " * 1023 + b"\r\n")
            assert client.response()[0] == 413


def test_malformed_bodies(server: Running) -> None:
    """500 random malformed bodies each get an answer, mostly a client error, and the server
    continues.
    """
    draw = random.Random(0)
    statuses, count = [], examples(500)
    with httpx.Client(base_url=server.url, timeout=20) as client:
        for _ in range(count):
            text = mutated(draw)
            path = draw.choice(["/v1/completions", "/v1/chat/completions", "/tokenize"])
            headers = {"content-type": "application/json"}
            answer = client.post(path, content=text, headers=headers)
            statuses.append(answer.status_code)
            assert answer.status_code == 200 or is_error(answer.json()), (text, answer.text)
        assert max(statuses) < 500
        assert statuses.count(200) < 0.3 * count
        assert client.get("/health").status_code == 200


def test_half_a_request_is_cut_off(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with Raw(server.port) as silent, Raw(server.port) as half, Raw(server.port) as second:
        half.send(b"POST /v1/completions HTTP/1.1\r\nhost")
        second.send(request(body()))
        assert second.response()[0] == 200
        second.send(b"GET")
        assert silent.ended() and half.ended() and second.ended()


def test_missing_body_times_out(engine: CountingEngine) -> None:
    options = Options(limits=Limits(body_s=0.2))
    with running(engine, noah_model(128), options) as server, Raw(server.port) as client:
        client.send(request(body())[:-5])
        status, answer = client.response()
    assert status == 408 and is_error(answer)


def test_rest_of_a_refused_body_is_cut_off(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that goes on to send, slowly, the body of a request that was refused."""
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with Raw(server.port) as client:
        client.send(request(body(), content_length="100000000"))
        assert client.response()[0] == 413
        with pytest.raises(OSError):
            for _ in range(200):
                client.send(b"x")
                time.sleep(0.01)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["close", "reset", "half"])
def test_client_that_leaves_frees_its_slots(
    server: Running, engine: CountingEngine, stream: bool, how: str
) -> None:
    engine.step_s = 0.02
    with Raw(server.port) as client:
        client.send(request(body(stream=stream, n=2, max_tokens=120)))
        until(lambda: engine.stats().running == 2, "both choices run")
        if how == "reset":
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif how == "half":
            client.socket.shutdown(socket.SHUT_WR)
            until(lambda: len(engine.cancelled) == 2, "both choices are cancelled")
    until(lambda: len(engine.cancelled) == 2, "both choices are cancelled")
    assert engine.stats().running == 0
    until(lambda: not server.service.dispatcher.jobs, "the server forgets them")


@pytest.mark.parametrize("stream", [True, False])
def test_slot_is_free_an_iteration_after_its_client_has_left(
    tmp_path: Path, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the server has noticed that a client has left, the running iteration is completed, and
    no other runs. A long launch decodes meanwhile.
    """
    with running_checkpoint(make_checkpoint(tmp_path, context=LONG_ANSWER_TOKENS + 64)) as server:
        engine = server.service.engine
        assert isinstance(engine, Engine)
        cancel, seen = engine.cancel, [0]

        def posted() -> int:
            return int((engine._rows.output[0] != NO_TOKEN).sum())

        def noticed(request_id: str) -> None:
            cancel(request_id)
            seen[0] = posted()

        def leaves() -> bool:
            before = engine.stats().iterations
            seen[0] = LONG_ANSWER_TOKENS
            with Raw(server.port) as client:
                client.send(
                    request(body(stream=stream, max_tokens=LONG_ANSWER_TOKENS, ignore_eos=True))
                )
                until(lambda: engine.stats().running == 1 and posted() > 0, "the choice runs")
            until(lambda: engine.stats().running == 0, "the slot is free")
            until(lambda: not server.service.dispatcher.jobs, "the server forgets it")
            done = engine.stats().iterations - before
            assert 0 < done <= seen[0] + 1
            return done < LONG_ANSWER_TOKENS

        monkeypatch.setattr(engine, "cancel", noticed)
        assert any(leaves() for _ in range(20)), "the device was faster than the server"


def test_client_that_does_not_read_is_cut_off(
    engine: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_S", 0.3)
    engine.step_s, engine.context = 0.0, 1 << 17
    with running(engine, noah_model(1 << 17)) as server, Raw(server.port) as client:
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.send(request(body(stream=True, max_tokens=100_000)))
        other = httpx.post(f"{server.url}/v1/completions", json=GOOD, timeout=20)
        assert other.status_code == 200
        until(lambda: not server.service.dispatcher.jobs, "the request has ended")
        assert engine.cancelled


def _whole(server: Running, content: bytes) -> tuple[int, Any]:
    headers = {"content-type": "application/json"}
    url = f"{server.url}/v1/completions"
    answer = httpx.post(url, content=content, headers=headers, timeout=20)
    return answer.status_code, answer.json()
