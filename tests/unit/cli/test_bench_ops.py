"""`ark bench ops`: figures as JSON, a chart beside torch, and errors that say what there is."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ark.bench.cases import cases
from ark.cli import main

CASE = "adds-64x4096-fp32"


def test_figures_and_chart_beside_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    table, chart = tmp_path / "rows.json", tmp_path / "chart.svg"
    asked = ["--backend", "cpu", "--vs", "torch", "--repeats", "1"]
    files = ["--json", str(table), "--svg", str(chart)]
    assert main(["bench", "ops", CASE, *asked, *files]) == 0
    (row,) = json.loads(table.read_text())["rows"]
    assert row["name"] == CASE and row["error"] == ""
    assert row["seconds"] > 0 and row["peer_seconds"] > 0 and row["distance"] == 0.0
    assert CASE in {text.text for text in ElementTree.parse(chart).iter() if text.text}


def test_a_result_with_operands_behind_it_is_the_one_compared() -> None:
    """A joined product's output is not its last operand."""
    from ark_cuda import machines

    from ark.bench.ops import planned

    case = next(c for c in cases() if c.name.startswith("linear-gelu"))
    plan, name = planned(case, machines.MODELS["h100"])
    assert [op.kind for op in plan.ops] == ["matmul"]
    shapes = {t.name: t.shape for t in plan.tensors}
    assert shapes[name] == (4096, 4096) and name not in ("in0", "in1", "in2")


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ops", "no-such-case"]) != 0
    assert "no case is called 'no-such-case'" in capsys.readouterr().err
