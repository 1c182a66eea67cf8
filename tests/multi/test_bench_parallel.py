"""`ark bench parallel`: predicted and measured times, on processes of this machine."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from ark.cli import main
from ark.cli.measure.results import Results, checked
from tests.cases.generate_ranks import NOAH
from tests.slow import slow

WORDS = ("bench", "parallel", "--backend", "cpu", "--config", str(NOAH), "--layers", "2")


def bench(*extra: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ark", *WORDS, "--sequence", "8", "--repeats", "2", *extra]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)


def test_plans_run_and_are_predicted() -> None:
    done = bench("--ranks", "2", "--batch", "2", "--plan", "megatron,1f1b", "--json", "-")
    assert done.returncode == 0, done.stderr
    output = checked(msgspec.json.decode(done.stdout, type=Results))
    assert output.machine.devices == 2
    assert [f.detail["plan"] for f in output.figures] == ["megatron", "1f1b"]
    for figure in output.figures:
        row = figure.detail
        assert (row["ranks"], row["sequence"], row["batch"], len(row["runs"])) == (2, 8, 2, 2)
        assert row["predicted_us"] > 0 and min(row["runs"]) > 0
        assert figure.ratio == pytest.approx(row["predicted_us"] / row["measured_us"])


@slow
def test_stages_of_two_ranks() -> None:
    words = ("--ranks", "4", "--width", "2", "--batch", "4", "--plan", "1f1b+megatron", "--json")
    done = bench(*words, "-")
    assert done.returncode == 0, done.stderr
    (row,) = (f.detail for f in checked(msgspec.json.decode(done.stdout, type=Results)).figures)
    assert (row["plan"], row["ranks"]) == ("1f1b+megatron", 4)
    assert row["predicted_us"] > 0 and min(row["runs"]) > 0


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ((), "for at least 2 ranks"),
        (("--ranks", "2", "--plan", "chimera"), "cannot be measured"),
        (("--ranks", "4", "--plan", "1f1b+megatron"), "does not form a mesh"),
        (("--ranks", "4", "--width", "2", "--plan", "chimera+megatron"), "cannot be measured"),
    ],
)
def test_unmeasured_cases_are_reported(
    extra: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, *extra]) == 2
    errors = capsys.readouterr().err
    assert says in " ".join(errors.split()) and "Traceback" not in errors


@slow
def test_errors_found_by_ranks_are_reported() -> None:
    done = bench("--ranks", "4", "--plan", "interleaved", "--layers", "1")
    assert done.returncode != 0
    assert "8 stages" in " ".join(done.stderr.split()) and "Traceback" not in done.stderr
