"""ci/decoders.py builds the table of architectures and formats from recorded runs only."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ark.models.checkpoint import Checkpoint
from tests import cells
from tests.cases.ci import load

decoders = load("decoders")
RUN = {"backend": "cpu", "how": "executed", "date": "2026-01-02"}


def test_cells_are_those_of_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "RESULTS", tmp_path)
    llama, gemma = ["Llama", "AWQ: uint4"], ["Gemma", "float32"]
    cpu = {**RUN, "cells": [llama, gemma]}
    rocm = {**RUN, "backend": "rocm", "how": "emulated", "cells": [llama]}
    for run in (cpu, rocm):
        (tmp_path / f"{run['backend']}.json").write_bytes(msgspec.json.encode(run))
    page = decoders.table()
    assert "| `Llama` | AWQ: uint4 | executed | emulated | not run |" in page
    assert "| `Gemma` | float32 | executed | not run | not run |" in page
    (tmp_path / "cpu.json").write_bytes(msgspec.json.encode({**cpu, "how": "guessed"}))
    with pytest.raises(msgspec.ValidationError):
        decoders.table()


def test_cell_is_written_where_its_test_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cells"
    monkeypatch.setenv(cells.FILE, str(path))
    monkeypatch.setattr(cells, "_pending", [])
    noah = Path("examples/noah")
    for checkpoint in (Checkpoint.open(noah), Checkpoint.open(noah, "int4", "int8")):
        for passed in (False, True):
            cells.compared(checkpoint, "cpu")
            cells.finish(passed)
    assert path.read_text().splitlines() == [
        "cpu\tLlamaForCausalLM\tbfloat16",
        "cpu\tLlamaForCausalLM\tquantised on load: int4; keys and values int8",
    ]


def test_cells_of_an_ended_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "RESULTS", tmp_path)
    path = tmp_path / "cells"
    path.write_text("cuda\tLlama\tfloat32\ncpu\tGemma\tfloat32\ncuda\tLlama\tfloat32\n")
    assert decoders.main(["cuda", "--cells", str(path)]) == 0
    assert decoders.read("cuda").cells == [("Llama", "float32")]
    path.write_text("cpu\tGemma\tfloat32\n")
    assert decoders.main(["cuda", "--cells", str(path)]) == 1


def test_another_backend_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decoders.main(["tpu"])
    assert "invalid choice: 'tpu'" in capsys.readouterr().err
