"""`ark chat`: conversations with an engine without a model and with the shipped checkpoint."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ark.cli import main
from ark.cli.chat import Talk, converse, message
from ark.errors import InvalidUsageError, SystemError
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.sampling import SamplingParams
from ark.models.tokenizer import Tokenizer
from ark.serving.memory import choose_pages
from tests.server.running import NOAH, TEMPLATE
from tests.server.stand_in import CountingEngine


def talk_with(engine: CountingEngine, say: Callable[[str], None], **sampling: Any) -> Talk:
    tokenizer = Tokenizer.open(NOAH, vocab_size=2048)
    templates = ChatTemplates("the test", {"default": TEMPLATE}, {})
    return Talk(engine, tokenizer, templates, SamplingParams(**sampling), frozenset([1]), say)


def ask(*lines: str) -> Callable[[str], str]:
    """Returns a function that replaces `input`: it returns these lines one after another, as if
    they were typed.
    """
    rest = iter(lines)

    def read(prompt: str) -> str:
        line = next(rest, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    return read


def test_conversation_is_rendered_whole_each_time(engine: CountingEngine) -> None:
    pieces: list[str] = []
    talk = talk_with(engine, pieces.append, max_tokens=3, temperature=0)
    talk.system = "Be brief."
    assert talk.answer("One") == "length" and talk.answer("Two") == "length"
    first, second = ("".join(pieces)[:3], "".join(pieces)[3:])
    decode = talk.tokenizer.decode
    assert decode(engine.submitted[1].prompt) == (
        f"system: Be brief.\nuser: One\nassistant: {first}\nuser: Two\nassistant:"
    )
    assert [m["content"] for m in talk.messages] == ["One", first, "Two", second]
    talk.reset("New")
    talk.answer("Three")
    assert decode(engine.submitted[2].prompt) == "system: New\nuser: Three\nassistant:"


def test_interrupt_stops_the_answer_and_keeps_its_part(engine: CountingEngine) -> None:
    pieces: list[str] = []

    def say(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            signal.raise_signal(signal.SIGINT)

    engine.step_s = 0.02
    talk = talk_with(engine, say, max_tokens=100)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    assert talk.answer("One") == "cancelled"
    assert talk.messages[1]["content"] == "".join(pieces) and 3 <= len("".join(pieces)) < 60
    assert engine.cancelled == ["chat-0"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert talk.answer("Two") == "length" or len(talk.messages) == 4


def test_message_that_does_not_fit_is_forgotten(engine: CountingEngine) -> None:
    from ark.serving.types import Request

    def submit(request: Request, on_event: Any) -> None:
        raise InvalidUsageError("the prompt has 900 tokens, but the context holds 128")

    engine.submit = submit  # type: ignore[method-assign]
    talk = talk_with(engine, print, max_tokens=3)
    with pytest.raises(InvalidUsageError, match="900"):
        talk.answer("One")
    assert talk.messages == []


def test_commands(engine: CountingEngine, capsys: pytest.CaptureFixture[str]) -> None:
    talk = talk_with(engine, lambda text: print(text, end=""), max_tokens=2)
    lines = ["", "One\\", "Two", "^C", "/help", "/nonsense", "/system Be brief.", "Three"]
    assert converse(talk, ask(*lines, "/exit", "Four")) == 0
    assert [m["content"] for m in talk.messages][::2] == ["Three"] and talk.system == "Be brief."
    decode = talk.tokenizer.decode
    assert decode(engine.submitted[0].prompt) == "user: One\nTwo\nassistant:"
    assert len(engine.submitted) == 2
    printed = capsys.readouterr()
    assert "/reset" in printed.out and "/nonsense is not a command" in printed.err
    converse(talk, ask("/reset"))
    assert talk.messages == [] and talk.system == "Be brief."
    converse(talk, ask("/system"))
    assert talk.system is None


def test_lines_ending_in_a_backslash_continue() -> None:
    assert message(ask("a\\", "b\\", "c", "d")) == "a\nb\nc"


def test_command_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who are you?\nAnd he?\n"))
    words = ["chat", str(NOAH), "--chat-template", str(template), "--backend", "cpu"]
    assert main([*words, "--max-new-tokens", "8"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(NOAH)
    model = AutoModelForCausalLM.from_pretrained(NOAH, dtype=torch.float32)
    messages, expected = [], ""
    for text in ("Who are you?", "And he?"):
        messages.append({"role": "user", "content": text})
        rendered = tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
        generated = model.generate(ids, max_new_tokens=8, do_sample=False)
        answer = tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    assert capsys.readouterr().out == expected


def test_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(NOAH)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_verdict_on_memory() -> None:
    checkpoint = Checkpoint.open(NOAH)
    # The model has 3,771,648 parameters of 2 bytes. A position takes the keys and values of 6
    # layers, each with 2 heads of 32 elements of 2 bytes; a page has 16 positions. The buffers of
    # an iteration's rows and of a prompt take the memory of 3 pages.
    weights, page = 2 * 3_771_648, 16 * 6 * 2 * 32 * 2 * 2
    room = 2 * (weights + (3 + 8) * page)  # half of it is used
    pages, verdict = choose_pages(checkpoint, room, 64, 2, 0.5, None)
    assert pages == 8 and "2 such requests fit at once" in verdict  # all slots
    assert choose_pages(checkpoint, room, 100, 2, 0.5, None)[0] == 8  # as many as fit, of 14
    assert choose_pages(checkpoint, room, 64, 2, 0.5, 5)[0] == 5
    for context, asked in ((129, None), (64, 9)):
        with pytest.raises(SystemError, match=r"the share 0.5 is used: room for 128 positions"):
            choose_pages(checkpoint, room, context, 2, 0.5, asked)


def test_full_context_is_reported(
    engine: CountingEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.context = 64
    talk = talk_with(engine, lambda text: None, max_tokens=None)
    converse(talk, ask("One", "Two"))
    output = " ".join(capsys.readouterr().err.split())
    assert "the answer was cut: the context of 64 tokens is full; /reset begins anew" in output
    assert re.search(
        r"has \d+ tokens with this message, but the context holds 64, .*/reset", output
    )
    assert len(talk.messages) == 2 and len(engine.submitted) == 1  # the second is left out
    talk.reset()
    assert talk.answer("Three") == "context"


@pytest.mark.parametrize("words", [["--api-key", ""], []])
def test_empty_api_key_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARK_API_KEY", "")
    assert main(["serve", str(NOAH), *words]) == 2
    assert "the API key is empty" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "3"], "is not divisible by 3 ranks"),
        (["--ranks", "2", "--task", "embed"], "--task embed runs on one device"),
    ],
)
def test_ranks_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(NOAH), *words]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
