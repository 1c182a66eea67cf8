"""The engine on each backend: requests that share rows, pages and prefixes give the tokens that
transformers generates for each alone.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from ark.models.build import FULL
from ark.models.sampling import SamplingParams
from ark.models.structured import StructuredOutputsParams
from ark.serving.engine import Engine
from ark.serving.loading import load_model
from ark.serving.progress import Step
from ark.serving.rows import DeviceRows, Launched
from ark.serving.scheduler import Scheduler, forms_of
from ark.serving.types import Event, FinishReason, Request
from tests.checkpoints import make_checkpoint, reference
from tests.serving.requests import Listener
from tests.slow import slow

pytestmark = pytest.mark.emulated("slow")
BEGINNING = (7, 301, 12, 45, 45, 260, 3, 99)
PROMPTS = ((*BEGINNING, 5, 17), (9,), (*BEGINNING, 200), (11, 12, 13))
MAX_NEW_TOKENS, VOCABULARY_TOKENS = 8, 320


class EveryThird:
    """A grammar that permits, at position n of a text, only tokens whose number modulo 3 equals n
    modulo 3.
    """

    def __init__(self) -> None:
        self.place = 0

    def begin(self) -> EveryThird:
        return EveryThird()

    def advance(self, tokens: Sequence[int]) -> np.ndarray:
        self.place += len(tokens)
        return np.arange(VOCABULARY_TOKENS) % 3 == self.place % 3


def by_transformers(directory: Path, formed: Sequence[int] = ()) -> list[list[int]]:
    """Returns transformers' texts. formed: the indices of the prompts whose texts must follow the
    grammar EveryThird.
    """
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    texts = []
    for number, prompt in enumerate(PROMPTS):

        def allowed(_: int, text: torch.Tensor, begin: int = len(prompt)) -> list[int]:
            return list(range((len(text) - begin) % 3, VOCABULARY_TOKENS, 3))

        with torch.inference_mode():
            text = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                prefix_allowed_tokens_fn=allowed if number in formed else None,
            )[0].tolist()
        texts.append(text[len(prompt) :])
    return texts


@pytest.mark.parametrize("formed", [(), (0, 3)], ids=["plain", "masks"])
def test_requests_give_the_ids_of_transformers(
    backend: str, tmp_path: Path, formed: Sequence[int]
) -> None:
    """An engine with three rows and too few pages for all requests at once gives transformers'
    tokens. formed: the indices of the requests with a grammar.
    """
    directory = make_checkpoint(tmp_path / "small", layers=2, hidden=32, intermediate=48)
    wanted = by_transformers(directory, formed)
    texts: list[list[int]] = [[] for _ in PROMPTS]
    errors: list[str] = []
    ended = threading.Semaphore(0)

    def listen(event: Event) -> None:
        texts[int(event.id)] += event.tokens
        if event.finish is not None:
            errors.extend([event.error] if event.finish != FinishReason.LENGTH else [])
            ended.release()

    asked = {"slots": 3, "context": 24, "chunk": 4, "page": 4, "pages": 8}
    asked |= {"sampling": FULL} if formed else {}
    form = StructuredOutputsParams(regex=".")  # the engine reads only the grammar
    with Engine.open(directory, backend, **asked) as engine:  # type: ignore[arg-type]
        for number, prompt in enumerate(PROMPTS):
            how = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
            request = Request(str(number), prompt, how)
            if number in formed:
                how = replace(how, structured_outputs=form)
                request = replace(request, sampling=how, grammar=EveryThird())
            engine.submit(request, listen)
        for _ in PROMPTS:
            assert ended.acquire(timeout=300)
        stats = engine.stats()
    assert not errors and texts == wanted
    assert stats.cached_prompt_tokens >= len(BEGINNING)


def test_flag_of_the_host_ends_a_launch(backend: str, tmp_path: Path) -> None:
    """The host sets a word in memory to end a launch. If it is set before the launch, one iteration
    runs, a chunk of a prompt. If it is set during a launch, the iterations that have begun are
    completed, on a GPU perhaps one more. The tokens equal those of a launch that the host does not
    end.
    """
    late = 1 if backend == "cpu" else 2
    directory = make_checkpoint(tmp_path / "small", layers=1, hidden=32, intermediate=48)
    model = load_model(directory, backend, slots=2, context=24, chunk=4, page=4)
    try:
        rows = DeviceRows(model.executor, model.shape)
        texts = []
        for leaves in (False, True):
            scheduler = Scheduler(2, 4, 24, model.page_pool(rows.reserved))
            for number in range(2):
                how = SamplingParams(temperature=0.0, seed=0, max_tokens=18)
                scheduler.add(Request(f"{leaves} {number}", PROMPTS[3], how))
            progress, counts = [*scheduler.waiting], []
            while not scheduler.idle:
                rows.stay()
                if leaves and len(counts) == 1:
                    rows.leave()
                step = scheduler.plan(24)
                launched = rows.start(step)
                seen = 0
                while leaves and len(counts) > 1 and launched.running() and seen < 3:
                    seen += sum(_take(scheduler, step, launched.read()))
                if seen >= 3:
                    rows.leave()
                    seen += sum(_take(scheduler, step, launched.read()))
                done, tokens = launched.end()
                _take(scheduler, step, tokens)
                scheduler.end(step, done)
                assert done.iterations <= (seen + late if seen else step.iterations)
                counts.append(astuple(done))
            assert counts[:2] == [(1, 1), (1, 0 if leaves else 18)] and (leaves or not counts[2:])
            texts.append([each.tokens for each in progress])
        assert texts[0] == texts[1]
    finally:
        model.close()


def _take(scheduler: Scheduler, step: Step, given: list[tuple[int, list[int]]]) -> list[int]:
    """Passes tokens to the scheduler. Returns how many tokens row 0 received in each call."""
    for row, tokens in given:
        scheduler.take(step, row, tokens)
    return [len(tokens) for row, tokens in given if row == 0]


@slow
@pytest.mark.timeout(1800)
def test_each_number_of_rows_has_a_decoding_phase(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1 to 64 requests at the same time: an iteration runs the decoding phase that is compiled for
    the smallest sufficient number of rows, and the tokens equal those of transformers.
    """
    directory = make_checkpoint(tmp_path / "small", layers=1, hidden=32, intermediate=48)
    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = torch.arange(64)[:, None] + torch.tensor([[20, 90, 200]])
    tokens = prompts
    with torch.inference_mode():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    used: set[int] = set()
    start = DeviceRows.start

    def spied(rows: DeviceRows, step: Step) -> Launched:
        used.add(next(n for n in forms_of(64) if n >= len(step.rows)) if step.rows else 0)
        return start(rows, step)

    monkeypatch.setattr(DeviceRows, "start", spied)
    how = SamplingParams(temperature=0.0, max_tokens=3)
    with Engine.open(
        directory, backend, slots=64, context=8, chunk=0, page=4, budget_s=300.0
    ) as engine:
        for count in (1, 2, 3, 7, 13, 30, 64):
            listener = Listener()
            for number in range(count):
                prompt = tuple(map(int, prompts[number]))
                engine.submit(Request(str(number), prompt, how), listener)
            listener.wait(*map(str, range(count)))
            assert listener.tokens == {str(n): tokens[n, 3:].tolist() for n in range(count)}
    assert used >= {1, 2, 4, 8, 16, 32, 64}


@slow
@pytest.mark.timeout(1800)
def test_rows_have_adapters_of_their_own(backend: str, tmp_path: Path) -> None:
    """Rows with two adapters and without one give the tokens of peft, in prompt chunks and in
    decoding.
    """
    peft = pytest.importorskip("peft")
    directory = make_checkpoint(tmp_path / "small", layers=1, hidden=32, intermediate=48)
    adapters: dict[str, Path] = {}
    texts = {"": by_transformers(directory)[0]}
    for number, targets in enumerate((["q_proj", "down_proj"], ["v_proj", "o_proj", "up_proj"])):
        torch.manual_seed(number)
        config = peft.LoraConfig(r=2 + 2 * number, lora_alpha=8, target_modules=targets)
        model = peft.get_peft_model(reference(directory), config)
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.3)
        adapters[str(number)] = tmp_path / str(number)
        model.save_pretrained(adapters[str(number)])
        tokens = torch.tensor([PROMPTS[0]])
        with torch.inference_mode():
            for _ in range(MAX_NEW_TOKENS):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        texts[str(number)] = tokens[0, len(PROMPTS[0]) :].tolist()
    how, listener = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS), Listener()
    asked = {"slots": 3, "context": 24, "chunk": 4, "page": 4, "budget_s": 300.0}
    with Engine.open(directory, backend, adapters=adapters, **asked) as engine:  # type: ignore[arg-type]
        for name in texts:
            engine.submit(Request(f"{name}.", PROMPTS[0], how, adapter=name), listener)
        listener.wait(*(f"{name}." for name in texts))
    assert listener.tokens == {f"{name}.": text for name, text in texts.items()}
    assert len(set(map(tuple, texts.values()))) == 3
