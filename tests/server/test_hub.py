"""Checkpoints by their names on a hub. The hub is a stand-in on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub import hub
from tests.server.running import NOAH

pytest.importorskip("huggingface_hub")

NAME = "someone/noah"
SAMPLED = ["--prompt", "The king said", "--max-new-tokens", "6", "--backend", "cpu"]
IN_PYTHON = (
    "import ark, sys; llm = ark.LLM(sys.argv[1], backend='cpu', max_model_len=64);"
    "print(llm.generate('The king', ark.SamplingParams(temperature=0))[0].outputs[0].text)"
)


def ark(
    home: Path, address: str, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs the command `ark`, or Python with `-c`, with that address as the Hugging Face hub."""
    variables = {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *(() if words[0] == "-c" else ("-m", "ark")), *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=home,
        env={**os.environ, **variables, **environment},
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


def test_without_a_hub_the_sentence_says_how_to_download(tmp_path: Path) -> None:
    given = ark(tmp_path, "http://127.0.0.1:9", "serve", NAME, "--port", "0")
    assert given.returncode == 2 and "Traceback" not in given.stderr
    assert "hf download someone/noah --local-dir noah" in " ".join(given.stderr.split())
