"""`ark generate --chat` and `--system`: the prompt that the model receives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from ark.cli import main
from ark.models.generate import Generator
from tests.chat_templates import TURNS
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = make_checkpoint(
        tmp_path_factory.mktemp("chat"), layers=1, hidden=32, intermediate=48, head_dim=8
    )
    (folder / "chat_template.jinja").write_text(TURNS)
    return str(folder)


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_prompt_equals_transformers(
    system: str | None,
    chatty: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = []
    stream = Generator.stream

    def recording(self: Generator, prompt: list[int], *others: object) -> object:
        prompts.append(prompt)
        return stream(self, prompt, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(Generator, "stream", recording)
    argv = ["generate", chatty, "--backend", "cpu", "--chat", "--prompt", " Hello ", "--json"]
    more = [] if system is None else ["--system", system]
    assert main([*argv, *more, "--max-new-tokens", "2"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 2
    before = [] if system is None else [{"role": "system", "content": system}]
    right = AutoTokenizer.from_pretrained(chatty).apply_chat_template(
        [*before, {"role": "user", "content": " Hello "}],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert prompts == [right]


def test_checkpoint_without_a_template(capsys: pytest.CaptureFixture[str]) -> None:
    noah = str(Path(__file__).parents[3] / "examples" / "noah")
    assert main(["generate", noah, "--backend", "cpu", "--prompt", "x", "--chat"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert main(["generate", noah, "--backend", "cpu", "--prompt", "x", "--system", "y"]) == 2
    assert "add --chat" in capsys.readouterr().err


def test_stop_strings_end_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    """`ark generate --stop` returns the text before the stop string: for one prompt and for
    several, as JSON and streamed.
    """
    noah = str(Path(__file__).parents[3] / "examples" / "noah")
    argv = ["generate", noah, "--backend", "cpu", "--prompt", "David", "--max-new-tokens", "24"]
    assert main([*argv, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    stop = whole["text"][20:24]
    assert main([*argv, "--json", "--stop", "\x01", "--stop", stop]) == 0
    ended = json.loads(capsys.readouterr().out)
    assert ended["text"] == whole["text"][: whole["text"].index(stop)]
    assert ended["tokens"] == whole["tokens"][: len(ended["tokens"])] != whole["tokens"]
    assert main([*argv, "--stop", stop]) == 0
    assert capsys.readouterr().out.rstrip("\n") == ended["text"].rstrip("\n")
    assert main([*argv, "--prompt", "David", "--json", "--stop", stop]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [ended, ended]
