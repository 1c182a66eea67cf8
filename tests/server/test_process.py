"""`ark serve` as a process: the line that it prints when it accepts requests, SIGTERM during work,
and its sockets.
"""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"), context=256)


@pytest.fixture
def served(directory: Path) -> Iterator[Process]:
    with Process(directory, "--port", "0", "--slots", "2") as process:
        yield process


def test_sigterm_while_it_works(served: Process) -> None:
    """After SIGTERM, requests that have begun are completed, new ones are refused, and the exit
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


def test_a_port_in_use_is_an_error_before_anything_is_loaded(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = [sys.executable, "-m", "ark", "serve", str(directory), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
