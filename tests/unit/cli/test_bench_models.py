"""`ark bench models`: its table, its notes, and figures that a second run keeps."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from ark.cli import main
from ark.cli.bench_models import notes, table
from ark.cli.bench_torch import figures_of
from ark.cli.measure.modules import ModuleFigures
from ark.cli.measure.whole_models import MODELS

MEASURED = ModuleFigures(
    "stable-diffusion-autoencoder-1x256",
    call=1.234567,
    kernel=1.2,
    build=123.4,
    memory=1_234_567_890,
    distance=1e-5,
    left=("aten.nonzero: sizes depend on values",),
    peer=2.5,
    peer_build=100.0,
)


def test_table_fits_80_columns_and_has_a_line_for_each_measured_model() -> None:
    rows = [figures_of(MEASURED, "onnxruntime"), figures_of(ModuleFigures("x", error="no file"))]
    shown = io.StringIO()
    Console(file=shown, width=80).print(table("whole models", "onnxruntime", rows))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("1234567" in line and "2500000" in line and "2.03" in line for line in lines)
    assert not any("no file" in line for line in lines)
    assert notes(rows[0]) == ["left to torch: aten.nonzero: sizes depend on values"]
    assert notes(rows[1]) == ["no file"]


def test_twenty_five_models_have_names() -> None:
    assert len(MODELS) >= 25


def test_unknown_name_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "models", "resnet51", "--backend", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "'resnet51'" in message and "gat-1024" in message


def test_resume_without_a_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "models", "gat-1024", "--resume"]) == 2
    assert "--json FILE" in capsys.readouterr().err


def test_training_step_has_the_losses_of_eager_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "figures.json"
    command = ["bench", "models", "dlrm-256", "--train", "--vs", "eager", "--backend", "cpu"]
    assert main([*command, "--repeats", "1", "--json", str(file)]) == 0
    (row,) = json.loads(file.read_text())["figures"]
    assert row["figure"] == "torch/dlrm-256-training"
    assert row["us"] > 0 and row["peer_us"] > 0
    assert row["detail"]["distance"] < 1e-5


def test_training_beside_onnxruntime_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "models", "dlrm-256", "--train", "--vs", "onnxruntime"]) == 2
    assert "onnxruntime does not train" in capsys.readouterr().err


@pytest.mark.slow
def test_second_run_keeps_the_figures_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.json"
    words = ["bench", "models", "gat-1024", "--vs", "eager", "--repeats", "1", "--backend", "cpu"]
    assert main([*words, "--json", str(file)]) == 0
    first = json.loads(file.read_text())["figures"]
    assert first[0]["detail"]["distance"] < 1e-4
    capsys.readouterr()
    assert main([*words, "--json", str(file), "--resume"]) == 0
    assert json.loads(file.read_text())["figures"] == first
    assert "gat-1024" not in capsys.readouterr().err
