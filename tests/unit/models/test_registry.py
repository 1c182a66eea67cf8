"""Decoders defined outside of ark: registered in a process, or by a package's entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ark.models
from ark.errors import InvalidUsageError, SystemError, UnsupportedError
from ark.models import registry
from ark.models.checkpoint import Checkpoint
from ark.models.llama import Llama
from tests.checkpoints import make_checkpoint

MODULE = """
from ark.models.llama import Attention, Layer, FeedForward, Llama

class Halved(Attention):
    def __init__(self, c, dtype, number):
        super().__init__(c, dtype, number)
        self.scale /= 2

class Mine(Llama):
    def layer(self, c, dtype, number):
        return Layer(c, dtype, Halved(c, dtype, number), FeedForward(c, dtype))

class NoDecoder:
    pass
"""
POINTS = """[ark.models]
MineForCausalLM = mine:Mine
BrokenForCausalLM = missing_module:Mine
OtherForCausalLM = mine:NoDecoder
"""


class Own(Llama):
    """A decoder that this test registers."""


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    tables: Any = (registry.ARCHITECTURES, registry.MODEL_TYPES)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def renamed(directory: Path, **fields: Any) -> Path:
    """Returns a Llama checkpoint with other fields in config.json."""
    result = make_checkpoint(directory)
    path = result / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return result


def test_registered_decoder_opens_its_checkpoints(tmp_path: Path) -> None:
    named = renamed(tmp_path / "named", architectures=["OwnForCausalLM"])
    typed = renamed(tmp_path / "typed", architectures=None, model_type="own")
    with pytest.raises(UnsupportedError, match="OwnForCausalLM"):
        Checkpoint.open(named)
    ark.models.register("OwnForCausalLM", Own, "own")
    ark.models.register("OwnForCausalLM", Own)  # repeating it changes nothing
    for directory in (named, typed):
        assert registry.decoder(Checkpoint.open(directory).config.architecture) is Own


@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("LlamaForCausalLM", Own, "is already registered for ark.models.llama:Llama"),
        ("OwnForCausalLM", dict, "must be a subclass of ark.models.llama.Llama"),
        ("OwnForCausalLM", "mine:Mine", "must be a subclass of ark.models.llama.Llama"),
    ],
)
def test_invalid_registrations_are_refused(name: str, module: Any, words: str) -> None:
    with pytest.raises(InvalidUsageError, match=words):
        ark.models.register(name, module)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a package with entry points on the path."""
    site = tmp_path / "site"
    info = site / "mine-1.dist-info"
    info.mkdir(parents=True)
    (site / "mine.py").write_text(MODULE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.syspath_prepend(str(site))
    registry._packages.cache_clear()
    return site


def generated(directory: Path, *extra: str) -> list[int]:
    argv = [sys.executable, "-m", "ark", "generate", str(directory), "--prompt", "The quick fox"]
    argv += ["--backend", "cpu", "--max-new-tokens", "12", "--json", *extra]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    tokens: list[int] = json.loads(done.stdout.splitlines()[-1])["tokens"]
    return tokens


@pytest.mark.usefixtures("installed")
def test_package_adds_a_decoder_to_the_command_line(tmp_path: Path) -> None:
    """`ark generate` uses a decoder that a package adds by an entry point, on one rank and on two:
    the tokens are not Llama's.
    """
    mine = renamed(tmp_path / "mine", architectures=["MineForCausalLM"])
    plain = renamed(tmp_path / "plain")
    tokens = generated(mine)
    assert tokens != generated(plain)
    assert tokens == generated(mine, "--ranks", "2")


@pytest.mark.usefixtures("installed")
def test_packages_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    assert "MineForCausalLM" in registry.architectures()
    with pytest.raises(SystemError, match="missing_module:Mine cannot be imported"):
        Checkpoint.open(renamed(tmp_path / "a", architectures=["BrokenForCausalLM"]))
    with pytest.raises(InvalidUsageError, match="must be a subclass"):
        Checkpoint.open(renamed(tmp_path / "b", architectures=["OtherForCausalLM"]))
    registry._packages.cache_clear()
