"""The `openai` package against a server whose engine runs a small checkpoint on the CPU. Texts are
compared with transformers' greedy ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ark.serving.http.run import Options
from tests.checkpoints import make_checkpoint
from tests.server.running import TEMPLATE, Running, running_checkpoint, until

PROMPTS = [
    "The quick brown fox",
    "A tile of a matmul",
    "lazy dog",
    "when the op is; the other tiles of the matmul follow it over the same channel",
    "jumps",
]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("served"), context=256)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return checkpoint


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Running]:
    with running_checkpoint(directory, Options(keys=("secret",))) as started:
        yield started


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=60
    ) as opened:
        yield opened


@pytest.fixture(scope="module")
def peer(directory: Path) -> tuple[PreTrainedModel, Any]:
    """Returns transformers' model and tokenizer of the directory that the server serves."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


def greedy(peer: tuple[PreTrainedModel, Any], ids: list[int], count: int = NEW_TOKENS) -> list[int]:
    """Returns transformers' greedy tokens."""
    generated = peer[0].generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=1
    )
    return generated[0, len(ids) :].tolist()


def text_of(peer: tuple[PreTrainedModel, Any], ids: list[int]) -> str:
    return str(peer[1].decode(ids, skip_special_tokens=True))


def test_greedy_texts_are_those_of_transformers(client: openai.OpenAI, peer: Any) -> None:
    answer = client.completions.create(
        model="small", prompt=PROMPTS, max_tokens=NEW_TOKENS, temperature=0
    )
    expected = [greedy(peer, peer[1](prompt).input_ids) for prompt in PROMPTS]
    assert [c.text for c in answer.choices] == [text_of(peer, ids) for ids in expected]
    for choice, ids in zip(answer.choices, expected, strict=True):
        assert choice.finish_reason == ("stop" if ids[-1] == 1 else "length")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(map(len, expected))
    assert answer.usage.prompt_tokens == sum(len(peer[1](p).input_ids) for p in PROMPTS)


def test_many_streams_at_once(server: Running, peer: Any) -> None:
    """More concurrent streams than slots: each gets its own text, in pieces of whole characters."""
    expected = [text_of(peer, greedy(peer, peer[1](prompt).input_ids)) for prompt in PROMPTS]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="small", prompt=prompt, max_tokens=NEW_TOKENS, temperature=0, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="secret", timeout=60) as client:
            return await asyncio.gather(*[one(client, prompt) for prompt in PROMPTS * 4])

    assert asyncio.run(all_of_them()) == expected * 4


def test_chats_are_rendered_and_continued_as_transformers_does(
    client: openai.OpenAI, peer: Any
) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Where is the fox?"},
    ]
    ids = peer[1].apply_chat_template(messages, add_generation_prompt=True)
    ids = ids if isinstance(ids, list) else ids["input_ids"]
    expected = text_of(peer, greedy(peer, ids))
    whole = client.chat.completions.create(
        model="small", messages=messages, max_completion_tokens=NEW_TOKENS, temperature=0
    )
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None and whole.usage.prompt_tokens == len(ids)
    chunks = list(
        client.chat.completions.create(
            model="small",
            messages=messages,
            max_tokens=NEW_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected
    assert chunks[-1].usage == whole.usage and not chunks[-1].choices


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI, peer: Any) -> None:
    text = text_of(peer, greedy(peer, peer[1](PROMPTS[0]).input_ids))
    stop = text[7:9]
    streamed = client.completions.create(
        model="small", prompt=PROMPTS[0], max_tokens=200, temperature=0, stop=stop, stream=True
    )
    chunks = list(streamed)
    assert "".join(chunk.choices[0].text for chunk in chunks) == text[: text.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_transformers(client: openai.OpenAI, peer: Any) -> None:
    answer = client.completions.create(
        model="small", prompt=PROMPTS[0], max_tokens=8, temperature=0, logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs and logprobs.token_logprobs and logprobs.top_logprobs and logprobs.tokens
    ids = peer[1](PROMPTS[0]).input_ids
    expected = greedy(peer, ids, 8)
    assert logprobs.tokens == [peer[1].decode([token]) for token in expected]
    with torch.no_grad():
        logits = peer[0](torch.tensor([ids + expected[:-1]])).logits[0, len(ids) - 1 :]
    best = torch.log_softmax(logits.float(), -1).topk(3)
    for i in range(len(expected)):
        assert logprobs.token_logprobs[i] == pytest.approx(float(best.values[i][0]), abs=1e-3)
        assert len(logprobs.top_logprobs[i]) <= 3  # tokens may have equal texts
        named = [peer[1].decode([int(token)]) for token in best.indices[i]]
        assert set(logprobs.top_logprobs[i]) == set(named)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_prompts(client: openai.OpenAI, peer: Any, stream: bool) -> None:
    """With `echo`, the log probabilities of the prompt's tokens come before those of the answer's
    tokens. The prompt's first token has none.
    """
    prompts = [peer[1](prompt).input_ids for prompt in (PROMPTS[0], PROMPTS[1])]
    prompts = [*prompts, [5], [7, 1, 9]]  # an end token in a prompt is a token like others
    answer: Any = client.completions.create(
        model="small",
        prompt=prompts,
        max_tokens=2,
        temperature=0,
        logprobs=1,
        echo=True,
        stream=stream,
        extra_body={"ignore_eos": True},
    )
    pieces = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    for place, ids in enumerate(prompts):
        mine = [piece for piece in pieces if piece.index == place]
        tokens = [t for piece in mine for t in piece.logprobs.tokens]
        values = [v for piece in mine for v in piece.logprobs.token_logprobs]
        best = [top for piece in mine for top in piece.logprobs.top_logprobs]
        offsets = [o for piece in mine for o in piece.logprobs.text_offset]
        text = "".join(piece.text for piece in mine)
        whole = ids + greedy(peer, ids, 2)
        assert tokens[: len(ids)] == [peer[1].decode([token]) for token in ids]
        assert len(values) == len(whole) and values[0] is None and best[0] is None
        assert all(
            text[o:].startswith(t) for o, t in zip(offsets, tokens, strict=True) if t in text
        )
        with torch.no_grad():
            logits = peer[0](torch.tensor([whole[:-1]])).logits[0].float()
        expected = torch.log_softmax(logits, -1)
        for at in range(1, len(whole)):
            row = expected[at - 1]
            assert values[at] == pytest.approx(float(row[whole[at]]), abs=1e-3)
            assert max(best[at].values()) == pytest.approx(float(row.max()), abs=1e-3)


def test_other_fields_reach_the_device(client: openai.OpenAI, peer: Any) -> None:
    ids = peer[1](PROMPTS[0]).input_ids
    (first,) = greedy(peer, ids, 1)
    answer = client.completions.create(
        model="small",
        prompt=PROMPTS[0],
        max_tokens=8,
        temperature=0,
        logit_bias={str(first): -100},
        presence_penalty=0.5,
        extra_body={"min_tokens": 8, "repetition_penalty": 1.1},
    )
    assert answer.usage is not None and answer.usage.completion_tokens == 8
    assert not answer.choices[0].text.startswith(peer[1].decode([first]))
    sampled = client.completions.create(
        model="small", prompt=PROMPTS[0], max_tokens=8, temperature=1.5, top_p=1e-6, seed=3
    )
    assert sampled.choices[0].text == text_of(peer, greedy(peer, ids, 8))


def test_seeds_and_samples(client: openai.OpenAI) -> None:
    def sampled(seed: int, n: int = 1) -> list[str]:
        answer = client.completions.create(
            model="small", prompt="The", max_tokens=12, temperature=2.0, seed=seed, n=n
        )
        return [choice.text for choice in answer.choices]

    three = sampled(11, n=3)
    assert len(set(three)) == 3
    assert sampled(11) == three[:1] and sampled(12) == three[1:2]


def test_errors_have_the_types_of_the_package(server: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="a", max_tokens=5000)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="small", messages=[{"role": "user", "content": "a"}], n=1000
        )
    assert caught.value.param == "n"
    wrong = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["small"]


def test_stream_that_is_closed_frees_its_slots(server: Running, client: openai.OpenAI) -> None:
    engine, choices = server.service.engine, 100
    before = engine.stats().generated_tokens
    stream = client.completions.create(
        model="small",
        prompt="The",
        n=choices,
        max_tokens=200,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    until(lambda: engine.stats().running + engine.stats().waiting == 0, "the slots are free")
    assert engine.stats().generated_tokens - before < choices * 200 / 2
    until(lambda: engine.stats().free_pages == engine.stats().pages, "the pages are free")
