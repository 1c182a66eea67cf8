"""ark.LLM compared with transformers on the same checkpoint."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ark
from ark.serving.llm import LLM
from tests.chat_templates import TURNS
from tests.checkpoints import make_checkpoint

TEXTS = ["The quick brown", "A tile of a matmul leaves for its peer", "the lazy dog. "]
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"head_dim": None},
    "qwen3": {},
}
GREEDY = ark.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def checkpoint(directory: Path, kind: str) -> Path:
    folder = make_checkpoint(
        directory, kind=kind, layers=1, hidden=32, intermediate=48, **{"head_dim": 8, **KINDS[kind]}
    )
    (folder / "chat_template.jinja").write_text(TURNS)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("llm"), "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with ark.LLM(folder, backend="cpu", max_num_seqs=3, max_model_len=96, chunk=16) as opened:
        yield opened


def theirs(folder: Path, ids: list[int], count: int, **how: Any) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **how}
    with torch.inference_mode():
        text = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=count,
            **options,
        )
    return text[0].tolist()[len(ids) :]


@pytest.mark.parametrize("kind", list(KINDS))
def test_greedy_texts_equal_transformers(kind: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, kind)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    with ark.LLM(str(directory), backend="cpu", max_num_seqs=2, max_model_len=64) as llm:
        outputs = llm.generate(TEXTS, GREEDY)
    for text, output in zip(TEXTS, outputs, strict=True):
        ids = tokenizer(text)["input_ids"]
        assert list(output.prompt_token_ids) == ids
        right = theirs(directory, ids, 12)
        (one,) = output.outputs
        assert list(one.token_ids) == right
        whole = tokenizer.decode(ids + right, skip_special_tokens=True)
        before = tokenizer.decode(ids, skip_special_tokens=True)
        assert before + one.text == whole
        assert (output.prompt, one.index, one.finish_reason) == (text, 0, "length")
        assert 0 < one.timings.first_token_s <= one.timings.total_s


def test_chat_equals_transformers(llm: LLM, folder: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    (output,) = llm.chat(messages, GREEDY)
    assert list(output.prompt_token_ids) == ids
    assert list(output.outputs[0].token_ids) == theirs(folder, ids, 12)
    several = llm.chat([messages, messages[1:]], GREEDY)
    assert several[0].outputs[0].token_ids == output.outputs[0].token_ids
    assert len(several[1].prompt_token_ids) < len(ids)


def test_streams_give_the_same_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[0], GREEDY)
    chunks = list(llm.stream(TEXTS[0], GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.outputs[0].text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.outputs[0].token_ids
    assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    stream = llm.stream(TEXTS[0], GREEDY)
    assert whole.outputs[0].text.startswith(next(stream).text)  # one token or several
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate(TEXTS[0], GREEDY)[0].outputs[0].text == whole.outputs[0].text

    async def stream_and_generate() -> tuple[list[str], list[str]]:
        async def texts(text: str) -> list[str]:
            return [chunk.text async for chunk in llm.stream_async(text, GREEDY)]

        first, second, output = await asyncio.gather(
            texts(TEXTS[0]), texts(TEXTS[1]), llm.generate_async(TEXTS[0], GREEDY)
        )
        assert output.outputs[0].text == whole.outputs[0].text
        return first, second

    first, second = asyncio.run(stream_and_generate())
    assert "".join(first) == whole.outputs[0].text
    assert "".join(second) == llm.generate(TEXTS[1], GREEDY)[0].outputs[0].text


def test_stops_end_the_text(llm: LLM) -> None:
    (whole,) = llm.generate(TEXTS[0], GREEDY)
    one = whole.outputs[0]
    stop = one.text[3:5]
    how = ark.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(stop,))
    (ended,) = llm.generate(TEXTS[0], how)
    assert ended.outputs[0].text == one.text[: one.text.index(stop)]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", stop)
    token = one.token_ids[2]
    many = (*(t for t in range(320) if t not in one.token_ids), token)
    how = ark.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=many)
    (ended,) = llm.generate(TEXTS[0], how)
    assert ended.outputs[0].token_ids == one.token_ids[: one.token_ids.index(token) + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", token)


def test_samples_logprobs_and_seeds(llm: LLM, folder: Path) -> None:
    how = ark.SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True, top_p=0.95, logprobs=2)
    (first,) = llm.generate(TEXTS[0], how)
    (repeated,) = llm.generate(TEXTS[0], how)
    assert [o.token_ids for o in first.outputs] == [o.token_ids for o in repeated.outputs]
    assert len({o.token_ids for o in first.outputs}) == 3
    assert [o.index for o in first.outputs] == [0, 1, 2]
    alone = ark.SamplingParams(seed=5, max_tokens=6, ignore_eos=True, top_p=0.95)
    assert llm.generate(TEXTS[0], alone)[0].outputs[0].token_ids == first.outputs[1].token_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    with torch.inference_mode():
        log = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
    total = 0.0
    for i, best in enumerate(first.outputs[0].logprobs or ()):
        row = log[len(first.prompt_token_ids) - 1 + i]
        token = first.outputs[0].token_ids[i]
        total += float(row[token])
        assert {token, *torch.topk(row, 2).indices.tolist()} == set(best)
        for other, entry in best.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert entry.decoded_token == llm.get_tokenizer().token_text(other)
    assert first.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-3)
    assert first.outputs[0].logprobs is not None


def test_each_prompt_has_its_sampling_and_ids_are_taken(llm: LLM) -> None:
    short = ark.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    ids = llm.get_tokenizer().encode(TEXTS[0])
    outputs = llm.generate([ids, TEXTS[0]], [short, GREEDY])
    assert outputs[0].prompt is None
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids[:2]
    assert llm.generate(ids, short)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_default_is_generation_configs(folder: Path, llm: LLM, tmp_path: Path) -> None:
    assert llm.get_default_sampling_params().greedy
    assert len(llm.generate(TEXTS[0])[0].outputs[0].token_ids) > 12
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    fields = {"do_sample": True, "top_p": 0.5, "max_new_tokens": 3, "eos_token_id": None}
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with ark.LLM(tmp_path, backend="cpu", max_num_seqs=1, max_model_len=32, chunk=0) as other:
        how = other.get_default_sampling_params()
        assert (how.top_p, how.top_k, how.temperature) == (0.5, 50, 1.0)
        assert len(other.generate("x")[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    ("prompts", "sampling", "words"),
    [
        (5, None, "the prompts are 5"),
        (b"x", None, "the prompts are b'x'"),
        ([1, "x"], None, "the prompts are"),
        ("x", "greedy", "sampling_params is 'greedy'"),
        (["x", "y"], [GREEDY], "one for each of the 2 prompts"),
        ([[320]], None, "the token 320"),
        ([[]], None, "no tokens"),
        ([list(range(96))], None, "context holds"),
        ("x", ark.SamplingParams(logprobs=20, logit_bias={400: 1.0}), "name the token 400"),
    ],
)
def test_wrong_calls(llm: LLM, prompts: Any, sampling: Any, words: str) -> None:
    with pytest.raises(ark.InvalidUsageError, match=words):
        llm.generate(prompts, sampling)


def test_wrong_arguments(folder: Path) -> None:
    with pytest.raises(ark.UnsupportedError, match="runs on one device"):
        ark.LLM(folder, backend="cpu", ranks=2)
    for share in (0, 1.5, "x"):
        with pytest.raises(ark.InvalidUsageError, match="memory_share"):
            ark.LLM(folder, backend="cpu", memory_share=share)  # type: ignore[arg-type]
    with pytest.raises(ark.error.SystemError, match=r"weights take .* lower the context"):
        ark.LLM(folder, backend="cpu", memory_share=1e-12)
    with pytest.raises(ark.ModelError, match="does not exist"):
        ark.LLM("/nowhere")


def test_requests_that_leave_no_token_are_refused_and_the_others_go_on(folder: Path) -> None:
    with ark.LLM(folder) as llm:
        every = tuple(range(llm._checkpoint.config.vocab_size))
        for more in ({"suppress_tokens": every}, {"stop_token_ids": every, "min_tokens": 2}):
            with pytest.raises(ark.InvalidUsageError, match="none can be sampled"):
                llm.generate([[5, 6]], ark.SamplingParams(max_tokens=3, **more))
        assert len(llm.generate([[5, 6]], ark.SamplingParams(max_tokens=3))[0].outputs) == 1


def test_prompts_and_messages_of_other_types_are_refused(folder: Path) -> None:
    with ark.LLM(folder) as llm:
        for prompt in ([-1], [1 << 70], [True], [1.0], ["a", "b"], 5, None):
            with pytest.raises(ark.InvalidUsageError, match="give a"):
                next(llm.stream(prompt))
        for messages in ({"role": "user", "content": "a"}, 5, "hi"):
            with pytest.raises(ark.InvalidUsageError, match="the messages are"):
                llm.chat(messages)
    for model in (None, 5):
        with pytest.raises(ark.InvalidUsageError, match="the model is"):
            ark.LLM(model)


def test_request_of_a_forked_process_is_refused(folder: Path) -> None:
    with ark.LLM(folder) as llm:
        child = os.fork()
        if child == 0:
            try:
                llm.generate([[5, 6]])
            except ark.InvalidUsageError as error:
                os._exit(0 if "another process" in str(error) else 3)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_answer_cut_by_close_raises(folder: Path) -> None:
    llm = ark.LLM(folder)
    chunks = llm.stream([5, 6], ark.SamplingParams(max_tokens=None, ignore_eos=True))
    next(chunks)
    llm.close()
    with pytest.raises(ark.InvalidUsageError, match="closed while it generated"):
        for _ in chunks:
            pass
