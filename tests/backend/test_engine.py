"""The engine on each backend: requests that share rows, pages and a beginning give the tokens that
transformers give for each alone.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from ark.models.sampling import SamplingParams
from ark.serving.engine import Engine
from ark.serving.types import Event, FinishReason, Request
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.emulated("slow")
BEGINNING = (7, 301, 12, 45, 45, 260, 3, 99)
PROMPTS = ((*BEGINNING, 5, 17), (9,), (*BEGINNING, 200), (11, 12, 13))
MAX_NEW_TOKENS = 8


def by_transformers(directory: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = []
    for prompt in PROMPTS:
        with torch.inference_mode():
            text = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )[0].tolist()
        texts.append(text[len(prompt) :])
    return texts


def test_requests_give_the_ids_of_transformers(backend: str, tmp_path: Path) -> None:
    """Three slots, and pages for two of the requests."""
    directory = make_checkpoint(tmp_path / "small", layers=2, hidden=32, intermediate=48)
    wanted = by_transformers(directory)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    errors: list[str] = []
    ended = threading.Semaphore(0)

    def listen(event: Event) -> None:
        texts[int(event.id)] += event.tokens
        if event.finish is not None:
            errors.extend([event.error] if event.finish != FinishReason.LENGTH else [])
            ended.release()

    asked = {"slots": 3, "context": 24, "chunk": 4, "page": 4, "pages": 8}
    with Engine.open(directory, backend, **asked) as engine:  # type: ignore[arg-type]
        for number, prompt in enumerate(PROMPTS):
            how = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
            engine.submit(Request(str(number), prompt, how), listen)
        for _ in PROMPTS:
            assert ended.acquire(timeout=300)
        stats = engine.stats()
    assert not errors and texts == wanted
    assert stats.cached_prompt_tokens >= len(BEGINNING)
