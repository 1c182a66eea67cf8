"""`ark serve` as a process: the line that it prints when it accepts requests, SIGTERM during work,
and its sockets.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.server.process import PATIENCE_S, Process
from tests.server.raw import Raw
from tests.server.running import until

FAILS_AT_SIGNAL = """
import signal, threading, time
import ark.cli.serve
from ark.errors import GpuError
from ark.serving.loading import LoadedModel
from ark.serving.rows import Launched
from ark.serving.scheduler import Scheduler
fault = threading.Event()
signal.signal(signal.SIGUSR1, lambda number, frame: fault.set())
running = Launched.running
def checked(launched):
    if fault.is_set():
        raise GpuError("the device reported a fault")
    return running(launched)
Launched.running = checked
plan = Scheduler.plan
def slowly(scheduler, iterations):
    time.sleep(0.02)
    return plan(scheduler, 1)
Scheduler.plan = slowly
"""
NEVER_RELEASED = """
ark.cli.serve.RELEASE_S = 0.5
LoadedModel.close = lambda model: time.sleep(1000)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"), context=256)


@pytest.fixture
def served(directory: Path) -> Iterator[Process]:
    with Process(directory, "--port", "0", "--slots", "2") as process:
        yield process


def test_sigterm_while_it_works(served: Process) -> None:
    """After SIGTERM, requests that have begun are completed, new requests are refused, and the exit
    code is 0. Until then the process listens only on the requested address.
    """
    assert served.listens_where_asked()
    running = threading.Barrier(5)
    asked = {"prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True}

    def stream() -> str:
        url = f"{served.url}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
            lines = answer.iter_lines()
            text = next(lines)
            running.wait(PATIENCE_S)
            return text + "".join(lines)

    with ThreadPoolExecutor(4) as pool:
        # Two requests have slots; the other two wait for one.
        streams = [pool.submit(stream) for _ in range(2)]
        more = [pool.submit(stream) for _ in range(2)]
        running.wait(PATIENCE_S)
        served.process.send_signal(signal.SIGTERM)
        for text in [s.result() for s in [*streams, *more]]:
            assert '"finish_reason":"length"' in text and text.endswith("[DONE]")
    assert served.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


@pytest.mark.parametrize("more", ["", NEVER_RELEASED], ids=["released", "never released"])
def test_failed_engine_ends_the_process(directory: Path, more: str) -> None:
    """If the engine fails, running and waiting requests get an error object, and the process ends
    with code 2 and one paragraph, also if its device is never released.
    """
    asked = {"prompt": "The", "max_tokens": 200, "ignore_eos": True}
    running = threading.Barrier(3)

    def stream(url: str) -> str:
        with httpx.stream(
            "POST", url, json={**asked, "stream": True}, timeout=PATIENCE_S
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.wait(PATIENCE_S)
            return [line for line in lines if line][-2]

    def whole(url: str) -> str:
        answer = httpx.post(url, json=asked, timeout=PATIENCE_S)
        assert answer.status_code == 500
        return answer.text

    with Process(directory, "--port", "0", "--slots", "2", before=FAILS_AT_SIGNAL + more) as served:
        url = f"{served.url}/v1/completions"
        with ThreadPoolExecutor(5) as pool, Raw(served.port) as idle:
            idle.send(b"POST /v1/completions HTTP/1.1\r\n")
            begun = [pool.submit(stream, url) for _ in range(2)]
            running.wait(PATIENCE_S)
            waiting = [pool.submit(whole, url) for _ in range(2)]

            def all_wait() -> bool:
                return bool(httpx.get(f"{served.url}/stats").json()["waiting"] == 2)

            until(all_wait, "two requests wait")
            served.process.send_signal(signal.SIGUSR1)
            for text in [each.result() for each in [*begun, *waiting]]:
                error = json.loads(text.removeprefix("data: "))["error"]
                assert error["code"] == "engine_failed"
                assert "the device reported a fault" in error["message"]
            assert served.process.wait(PATIENCE_S) == 2
            assert idle.ended()
        assert served.process.stderr is not None
        memory, paragraph = served.process.stderr.read().splitlines()
        assert "free on the device" in memory
        assert "the device reported a fault; the server has ended" in paragraph
        assert ("was not released" in paragraph) == bool(more)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{served.url}/health")


def test_port_in_use_is_an_error_before_anything_is_loaded(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = [sys.executable, "-m", "ark", "serve", str(directory), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
