"""`ark bench fidelity`, which compares the cost model's predictions of about forty programs with
measured times.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ark.backend import registry
from ark.cli import main
from ark.cli.measure.ops import planned
from ark.cli.measure.predicted import FITTED, PROGRAMS, chosen
from ark.plan.cost import iteration_us

H200 = registry.get("cuda").machine("h200")


def test_forty_programs_are_cases() -> None:
    assert len(set(PROGRAMS)) == len(chosen(PROGRAMS, cpu=False)) == 40
    assert set(FITTED) < set(PROGRAMS) and 2 * len(FITTED) < len(PROGRAMS)


def test_it_prints_each_program_and_the_errors(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    names = ["sweep-exp-32x32-fp32", "sweep-add-32x32-fp32"]
    words = ["--backend", "cpu", "--repeats", "1", "--json", str(tmp_path / "found.json")]
    assert main(["bench", "fidelity", *names, *words]) == 0
    errors = capsys.readouterr().out
    assert all(name[:20] in errors for name in names)
    assert "2 programs: mean error" in errors
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert [row["figure"] for row in figures] == [f"fidelity/{name}" for name in names]
    assert all(row["peer"] == "cost model" and row["peer_us"] > 0 for row in figures)


# Microseconds measured on an H200. The programs have tasks that depend on each other on one
# processor, wait for one load after another, or are loaded by box copies.
ON_H200 = {
    "adds-64x4096-apart-fp32": 19.75,
    "adds-64x4096-apart-bf16": 14.15,
    "transpose-8192x8192-fp32": 205.1,
    "transpose-8192x8192-bf16": 81.2,
    "matmul-128x4096x4096-nt-bf16": 11.62,
    "matmul-512x4096x4096-nt-bf16": 26.12,
    "sweep-linear-10-512x512-fp32": 5.11,
}


@pytest.mark.parametrize("name", ON_H200)
def test_predictions_are_within_a_third_of_the_h200(name: str) -> None:
    plan, _ = planned(chosen([name], cpu=False)[0], H200)
    assert iteration_us(plan) == pytest.approx(ON_H200[name], rel=0.35)


# Microseconds measured on an H100 (docs/performance.md). Predictions are close to them.
MEASURED = {
    "add-64m-bf16": 134.0,
    "softmax-8192x4096-bf16": 51.0,
    "sum-rows-8192x8192-fp32": 90.8,
    "matmul-4096x4096x4096-nt-bf16": 202.5,
    "matmul-512x512x512-nt-bf16": 3.9,
    "sweep-matrix-vector-4096x4096-fp32": 25.1,
    "sweep-exp-32x32-fp32": 2.4,
}


@pytest.mark.parametrize("name", MEASURED)
def test_predictions_are_near_the_measurements(name: str) -> None:
    plan, _ = planned(chosen([name], cpu=False)[0], registry.get("cuda").machine("h100"))
    assert iteration_us(plan) == pytest.approx(MEASURED[name], rel=0.2)
