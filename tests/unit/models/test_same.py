"""Ranks that opened different weights report it, whichever byte differs. Files that are the same
are not read twice.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.errors import ModelError, SystemError
from ark.models import same
from ark.models.checkpoint import Checkpoint
from ark.models.same import check_same_model, digest
from ark.models.shards import read_header
from tests.checkpoints import make_checkpoint
from tests.slow import examples


class Pair:
    """Two ranks in two threads, with the methods that check_same_model needs."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=60)
        self.messages: list[bytes] = [b"", b""]

    def rank(self, number: int) -> Pair.Rank:
        return Pair.Rank(self, number)

    class Rank:
        def __init__(self, pair: Pair, number: int) -> None:
            self.pair, self.number = pair, number

        def all_gather(self, data: bytes) -> list[bytes]:
            self.pair.messages[self.number] = data
            self.pair.barrier.wait()
            actual = list(self.pair.messages)
            self.pair.barrier.wait()
            return actual

        def check_same(self, label: str, value: str) -> None:
            if len(set(self.all_gather(value.encode()))) > 1:
                raise SystemError(f"the ranks disagree on {label}")


def disagreement(directories: Sequence[Path]) -> list[str]:
    """Returns each rank's error message, or "" if it finds no difference."""
    pair, errors = Pair(), ["", ""]

    def run(number: int) -> None:
        try:
            check_same_model(pair.rank(number), Checkpoint.open(directories[number]))  # type: ignore[arg-type]
        except SystemError as error:
            errors[number] = str(error)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint whose embedding is larger than a megabyte."""
    root = tmp_path_factory.mktemp("same")
    return make_checkpoint(root / "original", layers=1, vocab=400, hidden=700, intermediate=48)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def flip(directory: Path, at: int) -> None:
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_copies_are_the_same_and_files_themselves_are_not_read(
    original: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disagreement([original, copy]) == ["", ""]
    read: list[int] = []
    monkeypatch.setattr(same, "read_bytes", lambda *_: read.append(1))
    link = copy.parent / "link"
    link.symlink_to(original)
    assert disagreement([original, original]) == disagreement([original, link]) == ["", ""]
    assert not read


def test_one_changed_byte_between_sampled_pages_is_detected(original: Path, copy: Path) -> None:
    """Two ranks with different weights are noticed if one byte differs that the earlier check,
    which read samples of pages, did not read.
    """
    tensor = read_header(copy / "model.safetensors")["model.embed_tokens.weight"]
    flip(copy, tensor.offset + 4096 + 7)
    assert disagreement([original, copy]) == ["the ranks disagree on the weights"] * 2


def test_changed_constant_of_the_config_is_detected(original: Path, copy: Path) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-4}))
    words = "the ranks disagree on the model's config and tensors"
    assert disagreement([original, copy]) == [words] * 2


@settings(max_examples=examples(50), deadline=None)
@given(data=st.data())
def test_every_byte_is_in_the_hash(original: Path, data: st.DataObject) -> None:
    """A change of any byte of the weights changes the hash. Files are hashed in pieces smaller than
    tensors, so bytes at borders of pieces are included.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(same, "PIECE_BYTES", 100_000)
        tensors = sorted(read_header(original / "model.safetensors").values(), key=lambda t: t.name)
        tensor = data.draw(st.sampled_from(tensors))
        at = tensor.offset + data.draw(st.integers(0, tensor.nbytes - 1))
        before = digest(Checkpoint.open(original))
        flip(original, at)
        try:
            assert digest(Checkpoint.open(original)) != before
        finally:
            flip(original, at)
        assert digest(Checkpoint.open(original)) == before


def test_file_that_has_become_shorter_is_named(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="has been truncated"):
        digest(checkpoint)
