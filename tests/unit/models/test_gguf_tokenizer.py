"""GGUF files: their tokenizers give the ids of transformers' AutoTokenizer(gguf_file=), their
configs equal the model's, and damaged ones are refused in one sentence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")

import gguf
from gguf import GGUFWriter, TokenType
from transformers import AutoTokenizer

from ark.cli import main
from ark.errors import BaseError, ModelError, UnsupportedError
from ark.models import checkpoint
from ark.models.chat import ChatTemplates
from ark.models.checkpoint import Checkpoint
from ark.models.formats.gguf import OTHERS
from ark.models.gguf_file import GgufFile, read_gguf
from ark.models.gguf_tokenizer import SPLITS
from ark.models.rope import inverse_frequencies
from ark.models.tokenizer import Tokenizer
from tests.cases.gguf_files import add_tokenizer, gguf_checkpoint
from tests.checkpoints import make_checkpoint

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    " two  spaces\n\n\tand 1234567 don't WE'LL camelCase",
    "é 漢字 🙂 \u200b",
    "<s> inside </s> of a text <think>x</think>",
    "",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    return gguf_checkpoint(tmp_path_factory.mktemp("gguf"), "Q8_0", metadata=template)[1]


def check_ids(path: Path) -> None:
    ours = Tokenizer.open(path)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.backend.encode(text).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("pre", [names.split()[0] for names in SPLITS.values()])
def test_words_of_bytes(directory: Path, pre: str, tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    writer = GGUFWriter(path, "qwen2")
    add_tokenizer(writer, directory, pre)
    finish(writer)
    check_ids(path)


@pytest.mark.parametrize("begin", [None, False])
def test_pieces(begin: bool | None, tmp_path: Path) -> None:
    """A SentencePiece tokenizer in a GGUF file without merges, which follow from the scores, gives
    transformers' ids.
    """
    words = ["▁the", "▁qu", "ick", "▁b", "row", "n", "fox", "▁jump", "s", "▁over", "la", "zy", "in"]
    words += ["do", "g", "id", "e", "▁t", "ex", "t", "▁", "a"]
    letters = sorted({c for word in words for c in word})
    pieces = list(dict.fromkeys([*words, "th", "he", "▁th", "▁q", "ro", "ow", *letters]))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, "<think>"]
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    types += [*[TokenType.NORMAL] * len(pieces), TokenType.USER_DEFINED]
    path = tmp_path / "t.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if begin is not None:
        writer.add_add_bos_token(begin)
    finish(writer)
    check_ids(path)


def finish(writer: GGUFWriter) -> None:
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_chat_template_is_in_the_file(intact: Path) -> None:
    tokenizer = Tokenizer.open(intact)
    templates = ChatTemplates.open(intact, tokenizer.special_tokens)
    assert templates.render([{"role": "user", "content": "Hi"}]) == "<s>Hi"


def test_factors_of_frequencies_divide_them(tmp_path: Path) -> None:
    """The tensor `rope_freqs` of a GGUF file, which Llama 3 has instead of a RoPE scaling, divides
    the rotary frequencies.
    """
    factors = np.linspace(1, 8, 12, dtype=np.float32)
    _, path, _ = gguf_checkpoint(tmp_path, "F16", more={"rope_freqs.weight": factors})
    rope = Checkpoint.open(path).config.rope
    plain = 10000.0 ** (-np.arange(0, 24, 2) / 24)
    np.testing.assert_allclose(inverse_frequencies(rope, 24, 100), plain / factors, rtol=1e-6)
    assert rope.attention_factor == 1


def damaged(intact: Path, tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(intact.read_bytes()))
    return path


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-100],
        lambda data: data[: len(data) // 3],
        lambda data: data[:3000],
        lambda data: data[:30],
        lambda data: data[:3],
        lambda data: b"",
        lambda data: b"GGML" + data[4:],
        lambda data: data[:4] + b"\x09" + data[5:],
        lambda data: data[:16] + b"\xff" * 8 + data[24:],
    ],
)
def test_damaged_files_are_refused(intact: Path, tmp_path: Path, change: Any) -> None:
    with pytest.raises(ModelError, match="is not an intact GGUF file"):
        Checkpoint.open(damaged(intact, tmp_path, change))


def test_command_reports_a_truncated_file_in_one_line(
    intact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = damaged(intact, tmp_path, lambda data: data[:-100])
    assert main(["generate", str(path), "--prompt", "x", "--backend", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "is not an intact GGUF file" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("find", "put", "error", "words"),
    [
        (b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lamma", UnsupportedError, "'lamma'"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_z.weight", ModelError, "lacks .*1.self_attn.q_proj"),
        (
            b"llama.embedding_length",
            b"llama.embedding_lengtj",
            ModelError,
            r"no llama\.embedding_length",
        ),
        (b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez", ModelError, "tokens of a gpt2"),
    ],
)
def test_contradictory_files_are_refused(
    intact: Path, tmp_path: Path, find: bytes, put: bytes, error: Any, words: str
) -> None:
    def change(data: bytes) -> bytes:
        assert find in data
        return data.replace(find, put)

    path = damaged(intact, tmp_path, change)
    with pytest.raises(error, match=words):
        Checkpoint.open(path)
        Tokenizer.open(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("general.architecture", []),
        ("llama.attention.key_length", 0),
        ("llama.attention.key_length", "24"),
        ("llama.attention.key_length", 25),
        ("llama.attention.head_count", 1 << 40),
        ("tokenizer.ggml.eos_token_id", [[1]]),
    ],
)
def test_metadata_of_other_types_and_sizes_is_refused(
    intact: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    file = read_gguf(intact)
    changed = GgufFile(file.path, {**file.metadata, key: value}, file.tensors)
    monkeypatch.setattr(checkpoint, "read_gguf", lambda _: changed)
    with pytest.raises(BaseError) as error:
        Checkpoint.open(intact)
    assert "\n" not in str(error.value)


def test_missing_files_and_directories_are_reported(intact: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"absent\.gguf does not exist"):
        Checkpoint.open(tmp_path / "absent.gguf")
    with pytest.raises(UnsupportedError, match=r"give that file"):
        folder = make_checkpoint(tmp_path / "folder")
        (folder / "model.safetensors").unlink()
        (folder / "m.gguf").write_bytes(intact.read_bytes())
        Checkpoint.open(folder)


def test_all_types_of_the_package_are_known() -> None:
    """Each tensor type of the gguf package is either supported or listed as one that weights do not
    have.
    """
    from ark.models.formats.gguf import BLOCKS

    for kind in (*BLOCKS, *OTHERS):
        assert kind in gguf.GGMLQuantizationType.__members__
    for kind, block in BLOCKS.items():
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        assert size == (block.inputs, block.nbytes)
