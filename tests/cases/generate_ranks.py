"""Cases and helpers of tests/multi/test_generate_ranks.py, which other tests use too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ark.backend import registry
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.tokenizer import Tokenizer

NOAH = Path(__file__).resolve().parents[2] / "examples/noah"
PROMPT = "The king said to his servants,"


def start(directory: Path, *extra: str, **environment: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "ark", "generate", str(directory), *extra]
    if "--prompt" not in extra:
        argv += ["--prompt", PROMPT]
    return subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def answer(directory: Path, *extra: str) -> dict:
    process = start(directory, "--json", *extra)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def alone(directory: Path, count: int, prompt: str = PROMPT, backend: str = "cpu") -> list[int]:
    """Returns the tokens that one rank generates in this process."""
    chosen = registry.get(backend)
    device = chosen.open(0)
    with Generator(Checkpoint.open(directory), chosen, device) as generator:
        tokens = list(generator.stream(Tokenizer.open(directory).encode(prompt), count))
    device.close()
    return tokens
