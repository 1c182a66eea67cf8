"""Requests with different LoRA adapters, which each request names; results are compared with peft's
on the same checkpoint in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from ark.errors import BaseError, InvalidUsageError
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.models.tokenizer import Tokenizer
from ark.serving.engine import Engine
from ark.serving.http.model import ServedModel
from ark.serving.types import Request
from tests.checkpoints import make_checkpoint, reference
from tests.server.running import running
from tests.serving.requests import MAX_POSITIONS, Listener, settled

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 16, "target_modules": ALL[:4]},
    "all": {"r": 8, "lora_alpha": 8, "target_modules": ALL, "use_rslora": True},
    "one layer": {"r": 2, "target_modules": ALL[4:], "layers_to_transform": [1]},
}
ASKED: dict[str, Any] = {"slots": 8, "context": MAX_POSITIONS, "page": 8, "chunk": 8, "draft": 2}
PROMPT, NEW_TOKENS = (*range(40, 50), *range(40, 50)), 24


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("small")
    return Checkpoint.open(make_checkpoint(directory, layers=2, hidden=32, intermediate=48))


@pytest.fixture(scope="module")
def adapters(small: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns an adapter of each kind with random matrices, as saved by peft."""
    peft = pytest.importorskip("peft")  # takes 3 s to import, so not at collection
    where = {}
    for seed, (name, fields) in enumerate(KINDS.items()):
        torch.manual_seed(seed)
        config = peft.LoraConfig(task_type="CAUSAL_LM", **fields)
        model = peft.get_peft_model(reference(small.directory), config)
        for key, value in model.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(value, std=0.3)
        where[name] = tmp_path_factory.mktemp("adapter")
        model.save_pretrained(where[name])
    return where


@pytest.fixture(scope="module")
def engine(small: Checkpoint, adapters: dict[str, Path]) -> Iterator[Engine]:
    with Engine.open(small, "cpu", adapters=adapters, **ASKED) as opened:
        yield opened


def theirs(small: Checkpoint, where: Path | None, prompt: tuple[int, ...], count: int) -> list[int]:
    """Returns the greedy text of transformers' model with peft's adapter."""
    model = reference(small.directory)
    if where is not None:
        model = pytest.importorskip("peft").PeftModel.from_pretrained(model, where).eval()
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_rows_have_adapters_of_their_own(
    engine: Engine, small: Checkpoint, adapters: dict[str, Path]
) -> None:
    """Requests with each adapter and with none run concurrently on one prompt, and again when its
    pages are cached. Rows that verify drafted tokens use the adapter of the request.
    """
    how = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)
    expected = {
        name: theirs(small, adapters.get(name), PROMPT, NEW_TOKENS) for name in ("", *adapters)
    }
    assert len({tuple(text) for text in expected.values()}) == len(expected)
    for turn in range(2):
        listener = Listener()
        for name in expected:
            request = Request(f"{turn} {name}", PROMPT, how, adapter=name)
            engine.submit(request, listener)
        listener.wait(*(f"{turn} {name}" for name in expected))
        assert listener.tokens == {f"{turn} {name}": expected[name] for name in expected}
    assert settled(engine).cached_prompt_tokens == len(expected) * 16


def test_models_name_chooses_the_adapter(
    engine: Engine, small: Checkpoint, adapters: dict[str, Path]
) -> None:
    tokenizer = Tokenizer.open(small.directory, vocab_size=320)
    templates = ChatTemplates("the test", {"default": "{{ messages[0].content }}"}, {})
    model = ServedModel("small", tokenizer, templates, engine.context, 320, frozenset())
    with running(engine, replace(model, adapters=tuple(adapters))) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [card.id for card in client.models.list()] == ["small", *adapters]
        for name in ("small", *adapters):
            text = theirs(small, adapters.get(name), PROMPT, 8)
            asked: dict[str, Any] = {"model": name, "max_tokens": 8, "temperature": 0}
            answer = client.completions.create(prompt=list(PROMPT), **asked)
            assert (answer.model, answer.choices[0].text) == (name, tokenizer.backend.decode(text))
            prompt = tokenizer.encode("The quick brown fox", False)
            chat = client.chat.completions.create(
                messages=[{"role": "user", "content": "The quick brown fox"}], **asked
            )
            text = theirs(small, adapters.get(name), tuple(prompt), 8)
            assert chat.choices[0].message.content == tokenizer.backend.decode(text)
        with pytest.raises(openai.NotFoundError, match="'other' does not exist; this server has"):
            client.completions.create(model="other", prompt="a")


def test_unknown_adapter_is_refused(engine: Engine) -> None:
    with pytest.raises(
        InvalidUsageError, match="'other' does not exist; this engine has attention"
    ):
        engine.submit(Request("1", PROMPT, SamplingParams(), adapter="other"), print)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3', but ark supports adapters of the type LORA only"),
    ({"use_dora": True}, "use_dora is True, which ark does not support"),
    ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
    ({"r": 0}, "r should be a positive integer"),
    ({"r": 5}, r"lora_A of .* has shape \[4, 32\], but adapter_config.json and the checkpoint"),
    ({"lora_alpha": "many"}, "lora_alpha should be a positive number"),
    ({"use_rslora": 3}, "use_rslora should be true or false"),
    ({"lora_alpha": 10**400}, "lora_alpha should be a positive number"),
    ({"lora_alpha": 1e300}, "the adapter 'a' has values for .* that are not finite in float32"),
    ({"target_modules": ["down_proj"]}, "layers_to_transform leave .* out, but adapter_model"),
    ({"target_modules": "("}, "target_modules should be a pattern or a list of names"),
    ({"layers_to_transform": [1]}, "layers_to_transform leave .*layers.0.* out"),
    ({"exclude_modules": ["v_proj"]}, "exclude_modules and layers_to_transform leave .*v_proj out"),
    ({"exclude_modules": r".*\.v_proj"}, "exclude_modules and layers_to_transform leave .*v_proj"),
    ({"exclude_modules": "("}, "exclude_modules should be a pattern or a list of names"),
    ({"layers_pattern": "h"}, "layers_pattern is 'h', which ark does not support"),
    ({"kasa_config": {"beta": 1.0}}, "kasa_config is {'beta': 1.0}, which ark does not support"),
    ({"use_bdlora": {"nblocks": 2}}, "use_bdlora is .*, which ark does not support"),
    ({"a_field_of_later_versions": True}, "a_field_of_later_versions is True, which ark does not"),
]


@pytest.mark.parametrize(("fields", "words"), WRONG)
def test_other_adapters_are_refused(
    small: Checkpoint, adapters: dict[str, Path], tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    for file in adapters["attention"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(BaseError, match=words):
        Engine.open(small, "cpu", adapters={"a": tmp_path}, **ASKED)


@pytest.mark.parametrize("given", [{"": "somewhere"}, {1: "somewhere"}, {"a": None}, ["a"]])
def test_adapters_without_names_or_directories_are_refused(small: Checkpoint, given: Any) -> None:
    with pytest.raises(InvalidUsageError, match="give a mapping from names that are not empty"):
        Engine.open(small, "cpu", adapters=given, **ASKED)


def test_missing_files_are_named(small: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(BaseError, match=r"should be in .*nowhere, which is not a directory"):
        Engine.open(small, "cpu", adapters={"a": tmp_path / "nowhere"}, **ASKED)
    with pytest.raises(BaseError, match=r"has no adapter_config\.json"):
        Engine.open(small, "cpu", adapters={"a": tmp_path}, **ASKED)
