"""`ark serve` as a process: its start line, SIGTERM while it works, and its sockets."""

from __future__ import annotations

import re
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
from tests.slow import slow

PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"), context=256)


class Process:
    """A running `ark serve`. A context manager that kills it."""

    def __init__(self, directory: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ark", "serve", str(directory), "--backend", "cpu", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        address = re.search(r"http://\S+", line)
        assert address, (line, self.process.communicate()[1])
        self.url = address.group()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def served(directory: Path) -> Iterator[Process]:
    with Process(directory, "--port", "0", "--slots", "2") as process:
        yield process


def listening(pid: int) -> list[str]:
    """The local addresses on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
        inodes |= {match.group(1)} if match else set()
    rows = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[9] in inodes and row[3] in ("0A", "07")]


def test_sigterm_while_it_works(served: Process) -> None:
    """What has begun ends whole, new requests are refused, and the exit code is 0. Until then it
    listens on the one address that was asked for.
    """
    port = int(served.url.rsplit(":", 1)[1])
    assert listening(served.process.pid) == [f"0100007F:{port:04X}"]
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
        # Two have slots; the other two wait for one.
        streams = [pool.submit(stream) for _ in range(2)]
        more = [pool.submit(stream) for _ in range(2)]
        running.wait(PATIENCE_S)
        served.process.send_signal(signal.SIGTERM)
        for text in [s.result() for s in [*streams, *more]]:
            assert '"finish_reason":"length"' in text and text.endswith("[DONE]")
    assert served.process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


@slow
def test_killed_and_started_again_on_the_same_port(directory: Path) -> None:
    with Process(directory, "--port", "0") as first:
        port = first.url.rsplit(":", 1)[1]
        with httpx.stream(
            "POST", f"{first.url}/v1/completions", json={"prompt": "a", "stream": True}
        ) as answer:
            next(answer.iter_lines())
            first.process.kill()
            first.process.wait(PATIENCE_S)
    with Process(directory, "--port", port) as second:
        assert httpx.get(f"{second.url}/health").status_code == 200


def test_a_port_in_use_is_an_error_before_anything_is_loaded(directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = [sys.executable, "-m", "ark", "serve", str(directory), "--port", port]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and f"127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr
