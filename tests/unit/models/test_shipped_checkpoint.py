"""The checkpoint in examples/: small, complete, loadable by transformers, and trained on
its text.
"""

from __future__ import annotations

import importlib.util
import io
import re
import struct
import sys
import tarfile
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ark.models.checkpoint import Checkpoint
from ark.models.tokenizer import Tokenizer
from tests.slow import slow

EXAMPLES = Path(__file__).parents[3] / "examples"
NOAH = EXAMPLES / "noah"
MAX_CHECKPOINT_BYTES = 8_000_000
VERSES = (
    "Jesus answered them, \"I told you, and you don't believe.",
    "David said to the men who stood by him,",
)


def script(name: str) -> ModuleType:
    """Loads a module of examples/train, which is not a package."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / "train" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_small_and_says_where_it_comes_from() -> None:
    assert sum(path.stat().st_size for path in NOAH.iterdir()) <= MAX_CHECKPOINT_BYTES
    readme = (NOAH / "README.md").read_text()
    assert "public domain" in readme and "train.py" in readme


def test_transformers_and_ark_read_the_same() -> None:
    model = AutoModelForCausalLM.from_pretrained(NOAH, dtype="auto")
    theirs = model.state_dict()
    checkpoint = Checkpoint.open(NOAH)
    assert sum(np.prod(a.shape) for _, a in checkpoint) == model.num_parameters()
    for name, weight in checkpoint.weights.items():
        np.testing.assert_array_equal(
            checkpoint.read(name).astype(np.float32), theirs[weight.stored_name].float().numpy()
        )
    config = checkpoint.config
    assert config.num_attention_heads > config.num_key_value_heads
    assert config.head_dim * config.num_attention_heads != config.hidden_size
    tokenizer = AutoTokenizer.from_pretrained(NOAH)
    for text in VERSES:
        assert Tokenizer.open(NOAH).encode(text) == tokenizer(text).input_ids


def test_it_predicts_sentences_better_than_their_words_in_disorder() -> None:
    model = AutoModelForCausalLM.from_pretrained(NOAH, dtype=torch.float32)
    tokenizer = Tokenizer.open(NOAH)

    def loss(text: str) -> float:
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.no_grad():
            return model(ids, labels=ids).loss.item()

    for verse in VERSES:
        assert loss(verse) < 3.5 < 5.0 < loss(" ".join(reversed(verse.split())))


@slow
def test_greedy_text_is_made_of_words_of_the_language() -> None:
    model = AutoModelForCausalLM.from_pretrained(NOAH, dtype=torch.float32)
    tokenizer = Tokenizer.open(NOAH)
    ids = torch.tensor([tokenizer.encode("The king said to his servants,")])
    out = model.generate(ids, do_sample=False, max_new_tokens=60, pad_token_id=1)
    words = re.findall(r"[a-z]+", tokenizer.decode(out[0].tolist()).lower())
    common = "the a of and to in is he his you your that will them they servants king with me said"
    assert len(words) > 40
    assert sum(word in common.split() for word in words) > len(words) / 3
    assert len(set(words)) > 12


def test_text_is_taken_out_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    book = (
        '<title>One</title><chapter n="1" sID="B.1"/><w lemma="x">In</w> the\n beginning'
        "<note>not this</note><w>God</w>, “it’s”—so"
        '<div type="x-p" sID="p"/>A new paragraph.<chapter n="2" sID="B.2"/><lg/>Poetry &amp; more'
    )
    packed = zlib.compress(book.encode())
    files = {
        f"{part}.{kind}": content
        for part in ("ot", "nt")
        for kind, content in (
            ("bzs", struct.pack("<III", 0, len(packed), len(book))),
            ("bzz", packed),
        )
    }
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w:xz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(f"./usr/share/modules/texts/ztext/b/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    members = (("debian-binary", b"2.0\n"), ("data.tar.xz", tarred.getvalue()))
    package = b"!<arch>\n"
    for name, content in members:
        package += f"{name:<16}{0:<12}{0:<6}{0:<6}{644:<8}{len(content):<10}`\n".encode()
        package += content + b"\n" * (len(content) % 2)
    (tmp_path / "b.deb").write_bytes(package)
    monkeypatch.setattr(
        sys, "argv", ["text.py", str(tmp_path / "b.deb"), "-o", str(tmp_path / "b.txt")]
    )
    script("text").main()
    once = 'In the beginning God, "it\'s"--so\nA new paragraph.\n\nPoetry & more'
    assert (tmp_path / "b.txt").read_text() == f"{once}\n\n{once}\n"


def test_training_script_writes_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The king said {n}.\nThe people went home." for n in range(60)))
    sizes = {
        "vocab": 300,
        "hidden": 16,
        "intermediate": 24,
        "layers": 1,
        "heads": 2,
        "kv-heads": 1,
        "head-dim": 4,
        "context": 16,
        "batch": 4,
        "epochs": 1,
        "sample-tokens": 2,
    }
    options = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    output = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["train.py", str(text), "-o", str(output), *options])
    script("train").main()
    assert "held-out" in capsys.readouterr().out
    checkpoint = Checkpoint.open(output)
    config = checkpoint.config
    assert "lm_head.weight" not in checkpoint.stored
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (16, 4, 300)
    assert AutoModelForCausalLM.from_pretrained(output).config.head_dim == 4
    assert Tokenizer.open(output, config.vocab_size).encode("The king")[0] == config.bos_token_id
