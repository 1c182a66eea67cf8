"""Two replicas of examples/ray_serve, one of which is killed under load. It runs only where Ray is
installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.checkpoints import make_checkpoint
from tests.server.running import until
from tests.slow import slow

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 180.0
REQUESTS, CLIENTS = 160, 12
MAX_TOKENS = 120
PROMPTS = [f"{word} fox jumps over the lazy dog, and then" for word in ("A", "The", "No", "Tile")]
PROGRAM = """
import sys
import ray
from ray import serve
from examples.ray_serve import app
port, directory = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
serve.run(app({"model": directory, "options": "--backend cpu"}))
print("ready", flush=True)
sys.stdin.read()
"""
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed"
)


class Cluster:
    """A process that runs Ray with the example's application. It ends when its standard input is
    closed.
    """

    def __init__(self, directory: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(directory)],
            stdin=subprocess.PIPE,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"},
        )

    def serves(self) -> bool:
        """Returns True when requests are accepted. Asserts that the process has not ended."""
        output = self.log.read_text()
        assert self.process.poll() is None, output
        return "\nready" in output

    def replicas(self) -> list[int]:
        """Returns the process ids of this cluster's replicas."""
        parents, names = {}, {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                names[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            parents[int(entry.name)] = int(fields[1]) if fields[0] != "Z" else 0

        def ours(pid: int) -> bool:
            while pid in parents and pid != self.process.pid:
                pid = parents[pid]
            return pid == self.process.pid

        return [p for p, name in names.items() if b"ServeReplica:default:Model" in name and ours(p)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    directory = make_checkpoint(tmp_path / "small", context=256)
    started = Cluster(directory, tmp_path / "log")
    try:
        until(started.serves, "Ray serves", PATIENCE_S)
        yield started
    finally:
        started.process.communicate(b"", PATIENCE_S)


def ask(
    cluster: Cluster,
    number: int,
    stream: bool,
    on_text: Callable[[int], None] = lambda replica: None,
) -> tuple[str, bool, int]:
    """Sends a request. Returns the text of its answer, True if the answer is complete, and the
    number of replicas that had died before. While an answer streams, `on_text` gets the process id
    of its replica at each part.
    """
    asked = {
        "prompt": PROMPTS[number % len(PROMPTS)],
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"{cluster.url}/v1/completions"
    if not stream:
        answer = httpx.post(url, json=asked, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], True, int(answer.headers["x-attempt"])
    text, whole = "", False
    with httpx.stream("POST", url, json=asked, timeout=PATIENCE_S) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                assert text and event["error"]["code"] == "replica_lost", event
                return text, False, 0
            text += event["choices"][0]["text"]
            on_text(int(answer.headers["x-replica"].rpartition(".")[2]))
            whole = event["choices"][0]["finish_reason"] == "length"
    return text, whole, int(answer.headers["x-attempt"])


def replica_of(cluster: Cluster, prompt: str) -> int:
    """Returns the process id of the replica that answers a request with this prompt."""
    asked = {"prompt": prompt, "max_tokens": 1}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=asked, timeout=PATIENCE_S)
    return int(answer.headers["x-replica"].rpartition(".")[2])


@slow
@pytest.mark.timeout(900)
@needs_ray
def test_killed_replica_loses_no_request_that_had_not_begun(cluster: Cluster) -> None:
    assert httpx.get(f"{cluster.url}/v1/models").json()["data"][0]["id"] == "small"
    refused = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "a", "n": 0})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "n"
    # Requests with one prefix go to one replica, requests with another prefix to another replica.
    by_prefix = [{replica_of(cluster, letter * 40 + str(i)) for i in range(4)} for letter in "ab"]
    assert [len(names) for names in by_prefix] == [1, 1] and by_prefix[0] != by_prefix[1]

    expected = [ask(cluster, number, stream=False)[0] for number in range(len(PROMPTS))]
    owners = [replica_of(cluster, prompt) for prompt in PROMPTS]
    first = max(owners, key=owners.count)
    (second,) = set(cluster.replicas()) - {first}
    unanswered = set(range(REQUESTS))
    ready = threading.Event()

    def one(number: int) -> tuple[bool, int]:
        streams = number // len(PROMPTS) % 2 == 0  # half of each prompt's requests

        def on_text(replica: int) -> None:
            # The previous request with this prompt does not stream. It has reached this replica.
            before = number - len(PROMPTS)
            if number >= REQUESTS // 8 and replica == first and before in unanswered:
                ready.set()

        text, whole, attempt = ask(cluster, number, streams, on_text)
        unanswered.remove(number)
        right = expected[number % len(PROMPTS)]
        assert text == right if whole else right.startswith(text)
        return whole, attempt

    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(one, number) for number in range(REQUESTS)]
        assert ready.wait(PATIENCE_S)
        os.kill(first, signal.SIGKILL)
        results = [answer.result() for answer in answers]
    cut = sum(not whole for whole, _ in results)
    assert cut < CLIENTS, "only answers that the replica had begun are cut"
    assert any(attempt for _, attempt in results), "a request was given to another replica"

    def back() -> bool:
        now = cluster.replicas()
        return len(now) == 2 and second in now and first not in now

    until(back, "there is another replica", PATIENCE_S)


@needs_ray
def test_application_without_arguments_serves_the_shipped_model() -> None:
    example = importlib.import_module("examples.ray_serve")
    assert (Path(example.NOAH) / "config.json").is_file()
    assert example.app({})


@needs_ray
def test_ray_without_the_router_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    example = importlib.import_module("examples.ray_serve")
    monkeypatch.setitem(sys.modules, example.ROUTER_MODULE, None)
    with pytest.raises(ImportError, match=r"Ray [\d.]+ does not provide .* install 'ray"):
        importlib.reload(example)
