"""Every argument of a Generator and of its streams with a wrong value: the value is refused with a
clear error before anything is planned.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ark
from ark.backend import registry
from ark.ir.dtype import bf16, fp32
from ark.models.checkpoint import Checkpoint
from ark.models.generate import Generator
from ark.models.plans import choose_chunk, usual_chunk

NOAH = Path(__file__).parents[3] / "examples" / "noah"
WRONG: list[Any] = ["2", 2.5, -1, 2**70, float("nan"), object(), b"x", [0.5]]
SERVED = {("chunk", 2**70), ("budget_s", 2.5)}


@pytest.fixture(scope="module")
def given() -> Iterator[dict[str, Any]]:
    backend = registry.get("cpu")
    device = backend.open(0)
    yield {
        "checkpoint": Checkpoint.open(NOAH),
        "backend": backend,
        "device": device,
        "context": 16,
    }
    device.close()


def is_served(name: str, wrong: Any) -> bool:
    return not isinstance(wrong, (list, bytes)) and (name, wrong) in SERVED


@pytest.mark.parametrize("name", list(inspect.signature(Generator).parameters))
def test_invalid_generator_arguments_are_refused(name: str, given: dict[str, Any]) -> None:
    for wrong in WRONG:
        if not is_served(name, wrong):
            with pytest.raises(ark.BaseError):
                Generator(**{**given, name: wrong})
                pytest.fail(f"{wrong!r} was taken")


def test_invalid_stream_arguments_are_refused(given: dict[str, Any]) -> None:
    with Generator(**given) as generator:
        good: dict[str, Any] = {"prompt": [1, 2], "max_new_tokens": 2}
        for name in inspect.signature(generator.stream).parameters:
            for wrong in WRONG:
                if (name, wrong) != ("max_new_tokens", 2**70):  # accepted: the context limits it
                    with pytest.raises(ark.InvalidUsageError):
                        list(generator.stream(**{**good, name: wrong}))
                        pytest.fail(f"{name} = {wrong!r} was taken")
        assert len(list(generator.stream(**good))) == 2


def test_chunk_beyond_the_context_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert (choose_chunk(None, 8, 16), choose_chunk(8, 8, 16)) == (8, 8)
    assert not capsys.readouterr().err
    assert choose_chunk(9, 8, 16) == 8
    assert "chunk=9 exceeds the context of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("machine", "chunks"),
    [
        ("h100", (512, 64)),
        ("a100", (64, 64)),
        ("mi300x", (512, 16)),
        ("mi250x", (128, 16)),
        ("cpu", (16, 16)),
    ],
)
def test_chunk_fills_matrix_units(machine: str, chunks: tuple[int, int]) -> None:
    assert tuple(usual_chunk(registry.machine(machine), t) for t in (bf16, fp32)) == chunks


@pytest.mark.parametrize("wrong", [5, b"x", ["sm_90a"]])
def test_architecture_is_a_word(wrong: Any) -> None:
    with pytest.raises(ark.InvalidUsageError, match="the architecture is"):
        ark.init(backend="cpu", arch=wrong)


def test_architecture_that_no_device_has() -> None:
    with pytest.raises(ark.SystemError, match="was given the architecture 'sm_999', but"):
        ark.init(backend="cpu", arch="sm_999")
    ark.init(backend="cpu")
