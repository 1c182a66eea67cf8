"""Checkpoints by their names on a hub. The hub is a stand-in on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.hub import hub
from tests.server.process import PATIENCE_S, Process
from tests.server.running import NOAH

pytest.importorskip("huggingface_hub")

NAME = "someone/noah"
SERVED = ("--port", "0", "--slots", "2", "--max-model-len", "64")
SAMPLED = ["--prompt", "The king said", "--max-new-tokens", "6", "--backend", "cpu"]
IN_PYTHON = (
    "import ark, sys; llm = ark.LLM(sys.argv[1], backend='cpu', max_model_len=64);"
    "print(llm.generate('The king', ark.SamplingParams(temperature=0))[0].outputs[0].text)"
)


def environment_of(home: Path, address: str) -> dict[str, str]:
    """Returns the variables with which huggingface_hub uses that address and an empty cache."""
    return {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}


def ark(
    home: Path, address: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command `ark`, or Python with `-c`, with that address as the Hugging Face hub."""
    return subprocess.run(
        [sys.executable, *(() if words[0] == "-c" else ("-m", "ark")), *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env={**os.environ, **environment_of(home, address), **environment},
    )


def test_names_are_downloaded_once(tmp_path: Path) -> None:
    asked: list[str] = []
    wanted = ark(tmp_path, "http://127.0.0.1:9", "generate", str(NOAH), *SAMPLED)
    assert wanted.returncode == 0, wanted.stderr
    with hub(NAME, NOAH, asked) as address:
        given = ark(tmp_path, address, "generate", NAME, *SAMPLED)
        assert (given.returncode, given.stdout) == (0, wanted.stdout), given.stderr
        loaded = [path for path in asked if path.endswith(".safetensors")]
        assert loaded and not [path for path in asked if path.endswith(".md")]
        asked.clear()
        given = ark(tmp_path, address, "-c", IN_PYTHON, NAME)
        assert given.returncode == 0 and given.stdout.strip(), given.stderr
        assert not [path for path in asked if path.endswith(".safetensors")]
        other = ark(tmp_path, address, "generate", "someone/else", *SAMPLED)
        assert other.returncode == 2 and "Traceback" not in other.stderr
        output = " ".join(other.stderr.split())
        assert "gave no checkpoint of that name" in output and "hf download someone/else" in output
    given = ark(tmp_path, address, "generate", NAME, *SAMPLED, HF_HUB_OFFLINE="1")
    assert (given.returncode, given.stdout) == (0, wanted.stdout), given.stderr


def test_server_of_a_name(tmp_path: Path) -> None:
    """`ark serve NAME` downloads the checkpoint and serves it under the name; a second start with
    the same cache needs no hub.
    """
    asked: list[str] = []
    body = {"model": NAME, "prompt": "The king said", "max_tokens": 6, "temperature": 0}
    texts = []
    with hub(NAME, NOAH, asked) as address:
        variables = environment_of(tmp_path, address)
        with Process(NAME, *SERVED, **variables) as server:
            assert [path for path in asked if path.endswith(".safetensors")]
            texts.append(completion(server, body))
    with Process(NAME, *SERVED, HF_HUB_OFFLINE="1", **variables) as server:
        texts.append(completion(server, body))
    with Process(NOAH, *SERVED, "--served-model-name", NAME) as server:
        texts.append(completion(server, body))
    assert texts == texts[-1:] * 3 and texts[0].strip()


def completion(server: Process, body: dict[str, Any]) -> str:
    """Returns the text of a completion, after a look at the list of models."""
    models = httpx.get(f"{server.url}/v1/models", timeout=PATIENCE_S).json()["data"]
    assert [model["id"] for model in models] == [NAME]
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_without_a_hub_the_sentence_says_how_to_download(tmp_path: Path) -> None:
    given = ark(tmp_path, "http://127.0.0.1:9", "serve", NAME, "--port", "0")
    assert given.returncode == 2 and "Traceback" not in given.stderr
    assert "hf download someone/noah --local-dir noah" in " ".join(given.stderr.split())
