"""`ark doctor --first-hour`: every step's outcome, the verdict and the archive."""

from __future__ import annotations

import json
import re
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from ark.backend import registry
from ark.cli import build_parser, main
from ark.cli.doctor import first_hour
from ark.cli.doctor.first_hour import Step

PAGE = Path("docs/first-hour-rocm.md")
CHECKS = {"checks": [{"check": "packets", "verdict": "pass", "text": "none torn"}]}


class Commands:
    """Replaces the start of processes. outputs: the text that a command prints, by its
    first word.
    """

    def __init__(self, **outputs: object) -> None:
        self.outputs = {"doctor": CHECKS, "tokens": [1, 2], "ranks": [1, 2], **outputs}
        self.asked: list[tuple[str, ...]] = []

    def __call__(self, words: Sequence[str], limit_s: float = 0.0) -> Step:
        self.asked.append(tuple(words))
        build_parser(list(words)).parse_args(list(words))
        output: object = {}
        if words[0] == "doctor":
            output = self.outputs["doctor"]
        elif words[0] == "generate":
            device = "cpu" not in words
            output = {"tokens": self.outputs["ranks" if "--ranks" in words else "tokens"]}
            output = output if device else {"tokens": [1, 2]}
        return Step(words[0], " ".join(words), "pass", "", 1.0, json.dumps(output))


def hour(**changes: object) -> first_hour.Hour:
    fields = {"backend": "rocm", "device": 0, "devices": 2, "emulated": False}
    return first_hour.Hour(**{**fields, "model": Path("examples/noah"), **changes})  # type: ignore[arg-type]


def taken(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> tuple[dict[str, str], tuple[bool, str, str]]:
    monkeypatch.setattr(first_hour, "run_ark", commands)
    asked = hour(**changes)
    done = list(first_hour.steps(asked))
    return {step.name: step.outcome for step in done}, first_hour.verdict(done, asked)


def test_after_passed_steps_the_next_step_is_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, (good, words, following) = taken(Commands(), monkeypatch)
    assert set(outcomes.values()) == {"pass"} and len(outcomes) == 6 and good
    assert words == "everything that ran passed here"
    assert "ci/evidence.py" in following and str(PAGE) in following


def test_wrong_tokens_and_a_failed_check_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, (good, words, following) = taken(Commands(ranks=[1, 3]), monkeypatch)
    assert [name for name, outcome in outcomes.items() if outcome == "fail"] == ["decode, 2 ranks"]
    assert not good and words == "decode, 2 ranks failed" and "--ranks 2" in following
    torn = {"checks": [{"check": "packets", "verdict": "fail", "text": "3 torn"}]}
    monkeypatch.setattr(first_hour, "run_ark", failing := Commands(doctor=torn))
    step = first_hour._doctor(hour())
    assert failing.asked and "packets: 3 torn" in step.text


def test_steps_without_devices_or_checkpoint_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes, (good, words, _) = taken(Commands(), monkeypatch, devices=1, emulated=True)
    assert good and outcomes["decode, 2 ranks"] == outcomes["bench decode"] == "left out"
    assert "proves nothing about hardware; left out: decode, 2 ranks, bench decode" in words
    outcomes, _ = taken(Commands(), monkeypatch, model=None)
    assert outcomes["decode"] == "left out"


def test_hanging_or_crashing_command_fails_its_step() -> None:
    late = first_hour.run_ark(("info",), limit_s=0.01)
    assert (late.outcome, late.text) == ("fail", "did not end within 0 s")
    broken = first_hour.run_ark(("info", "--require", "nobody:1"))
    assert broken.outcome == "fail" and "ended with code 2: " in broken.text


def test_command_writes_an_archive(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_hour, "run_ark", Commands())
    path = tmp_path / "report.zip"
    argv = ["doctor", "--backend", "cpu", "--first-hour"]
    assert main([*argv, "--bundle", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-3:]] == ["verdict", "send", "next"]
    with zipfile.ZipFile(path) as archive:
        report = json.loads(archive.read("report.json"))
        assert {"0-info.out", "1-doctor.out"} <= set(archive.namelist())
    assert report["backend"] == "cpu" and len(report["steps"]) == 6
    assert main([*argv, "--bundle", str(tmp_path / "no" / "x.zip")]) == 2
    assert "choose another --bundle" in capsys.readouterr().err
    assert main([*argv, "--json"]) == 2 and main(["doctor", "--model", "x"]) == 2


def test_commands_of_the_page_parse() -> None:
    """Every `ark` command in a code span of the page is accepted by ark's argument parser."""
    spans = re.findall(r"`(ark [^`]+)`", PAGE.read_text().replace("\n", " "))
    assert len(spans) >= 4
    for span in spans:
        words = shlex.split(span)[1:]
        build_parser(words).parse_args(words)


@pytest.mark.emulated("slow")
def test_emulated_device_passes(backend: str, tmp_path: Path) -> None:
    if not registry.probe(backend).emulated:
        pytest.skip("the steps run on emulated devices here")
    path = tmp_path / "report.zip"
    assert main(["doctor", "--backend", backend, "--first-hour", "--bundle", str(path)]) == 0
    with zipfile.ZipFile(path) as archive:
        report = json.loads(archive.read("report.json"))
    assert {s["name"]: s["outcome"] for s in report["steps"]}["decode"] == "pass"
