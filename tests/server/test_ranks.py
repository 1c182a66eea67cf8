"""`ark serve --ranks 2` on the CPU, compared with transformers, and its shutdown."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoTokenizer

from tests.checkpoints import make_checkpoint, reference
from tests.server.process import PATIENCE_S, Process
from tests.slow import slow

PROMPTS = [
    "The quick brown fox",
    "when the op is; the other tiles of the matmul follow it over the same channel",
    "jumps",
]
NEW_TOKENS = 24
OPTIONS = ("--port", "0", "--slots", "4", "--ranks", "2")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("served"), context=256)


def stream(url: str, prompt: str, tokens: int, begun: Callable[[], object] = int) -> str:
    """Returns the text of an answer, or its error. begun: called after the first piece of the
    answer's text.
    """
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    text = ""
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=PATIENCE_S) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return str(event["error"]["message"])
            if not text:
                begun()
            text += event["choices"][0]["text"]
    return text


@slow
@pytest.mark.timeout(600)
def test_two_ranks_share_a_model(directory: Path) -> None:
    """The answers of many concurrent requests equal transformers' texts, and requests that have
    begun complete after SIGTERM.
    """
    model, tokenizer = reference(directory), AutoTokenizer.from_pretrained(directory)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        whole = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=1)
        expected.append(tokenizer.decode(whole[0, ids.shape[1] :], skip_special_tokens=True))
    with Process(directory, *OPTIONS) as served:

        def leave() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):  # a client that disconnects during its answer
            stream(served.url, "leaves", 200, leave)
        with ThreadPoolExecutor(9) as pool:
            texts = pool.map(lambda p: stream(served.url, p, NEW_TOKENS), PROMPTS * 3)
            assert list(texts) == expected * 3
            last = pool.submit(
                stream, served.url, PROMPTS[0], NEW_TOKENS, lambda: served.process.terminate()
            )
            assert last.result() == expected[0]
        assert served.process.wait(PATIENCE_S) == 0


@slow
@pytest.mark.timeout(600)
def test_rank_that_dies_ends_the_server(directory: Path) -> None:
    with Process(directory, *OPTIONS) as served:
        children = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children")
        ranks = [int(pid) for pid in children.read_text().split()]
        (second,) = [pid for pid in ranks if b"RANK=1" in environment(pid)]
        text = stream(served.url, "jumps", 200, lambda: os.kill(second, signal.SIGKILL))
        assert "rank 1" in text
        assert served.process.wait(PATIENCE_S) != 0
        assert served.process.stderr is not None and "rank 1" in served.process.stderr.read()


def environment(pid: int) -> list[bytes]:
    """Returns the environment variables of a process."""
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
