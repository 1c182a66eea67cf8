"""ci/plans.py stores summaries of the plans of named programs, and lint reports changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ark.backend import registry
from ark.lower import thin_cuts
from tests.cases.ci import load

plan_programs, plans = load("plan_programs"), load("plans")
PROGRAMS = {program.name: program for program in plan_programs.programs()}

TEXT = """# head

add-64m-fp32
  all: block, predicted 187.6 us, 1 ops, 132 tasks, 0 waits
  claimed 1/132
  computes 67,108,864, moves 805,306,368 bytes
  1 counters; state 805,306,368

decoder-1b-prompts
  prompt: matrix, predicted 3725 us, 10 ops, 20 tasks, 30 waits
  decode: roles, predicted 699.6 us, 10 ops, 20 tasks, 30 waits
  9 counters; no bytes
"""


def slower(text: str, old: str, new: str) -> str:
    assert f"predicted {old} us" in text
    return text.replace(f"predicted {old} us", f"predicted {new} us")


def test_every_machine_has_a_file_of_the_same_programs() -> None:
    """The files of all machines have the same programs, except a CPU's file, which has only
    programs that are small enough for a few processors.
    """
    for machine in plans.LINT:
        registry.machine(machine)
        text = (plans.FOLDER / f"{machine}.txt").read_text()
        names = [block.splitlines()[0] for block in text.split("\n\n")[1:]]
        wanted = [p.name for p in PROGRAMS.values() if p.on_cpu or not machine.startswith("cpu")]
        assert names == wanted
        assert len(set(names)) == len(names) >= (40 if machine.startswith("cpu") else 60)
        assert all(us > 0 for us in plans.predicted(text).values())
    plans.read_reasons(plans.FOLDER / "reasons.toml")


@pytest.mark.parametrize("machine", plans.LINT)
@pytest.mark.parametrize("name", ["matmul-128x4096x4096-nt-bf16", "lstm-2x4-h64-bf16"])
def test_kept_text_is_the_plan_s(name: str, machine: str) -> None:
    text = plans.describe(PROGRAMS[name], registry.machine(machine))
    assert f"\n\n{text.strip()}\n" in (plans.FOLDER / f"{machine}.txt").read_text()


def test_products_that_are_cut_too_finely_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planner that cuts an LSTM's products of one row as if each ran alone is noticed: more tasks
    wait for each other, so the predicted time grows, and ci/plans.py demands a reason.
    """
    program, machine = PROGRAMS["lstm-2x4-h64-bf16"], registry.machine("h200")
    texts = ["#\n\n" + plans.describe(program, machine)]
    monkeypatch.setattr(thin_cuts, "_us", lambda sig, form, tile, machine, beside: tile[1])
    texts.append("#\n\n" + plans.describe(program, machine))
    shown = (re.findall(r"matmul\[\w+\] 14/([\d,]+)", text)[0] for text in texts)
    tasks = [int(count.replace(",", "")) for count in shown]
    assert tasks[0] < tasks[1]
    assert plans.write({"h200": texts[0]}, tmp_path) == 0
    assert plans.check({"h200": texts[1]}, tmp_path) == 1
    assert plans.write({"h200": texts[1]}, tmp_path) == 1


def test_times_are_read_by_program_and_phase() -> None:
    assert plans.predicted(TEXT) == {
        "add-64m-fp32": 187.6,
        "decoder-1b-prompts prompt": 3725.0,
        "decoder-1b-prompts decode": 699.6,
    }


def test_change_fails_the_check_and_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    assert plans.check({"h200": TEXT}, tmp_path) == 0
    moved = TEXT.replace("claimed 1/132", "fused 1/264")
    assert plans.check({"h200": moved}, tmp_path) == 1
    errors = capsys.readouterr().out
    assert "-  claimed 1/132" in errors and "+  fused 1/264" in errors
    assert plans.check({"mi300x": TEXT}, tmp_path) == 1  # a missing file


def test_time_that_grows_needs_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    little, much = slower(TEXT, "699.6", "720.0"), slower(TEXT, "699.6", "721.0")
    assert plans.write({"h200": much}, tmp_path) == 1
    errors = capsys.readouterr().err
    assert '"h200 decoder-1b-prompts decode" = [699.6, 721.0]' in errors and "3%" in errors
    assert (tmp_path / "h200.txt").read_text() == TEXT
    assert plans.write({"h200": little}, tmp_path) == 0
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    # A reason applies only to the time and machine that it names.
    reasons = tmp_path / "reasons.toml"
    for row in ('"h200 decoder-1b-prompts decode" = [699.6, 722.0]', '"mi300x add" = [1.0, 2.0]'):
        reasons.write_text(f'[[reason]]\nwhy = "norms are separate"\n[reason.us]\n{row}\n')
        assert plans.write({"h200": much}, tmp_path) == 1
    reasons.write_text(reasons.read_text() + '"h200 decoder-1b-prompts decode" = [699.6, 721.0]\n')
    assert plans.write({"h200": much}, tmp_path) == 0
    assert (tmp_path / "h200.txt").read_text() == much


def test_reason_is_kept_until_the_time_is_back(tmp_path: Path) -> None:
    slow = slower(TEXT, "187.6", "250.0")
    for texts, why in (({"h200": TEXT, "mi300x": TEXT}, ""), ({"h200": slow}, "claims are off")):
        assert plans.write(texts, tmp_path, why) in (0, 1)
    assert (tmp_path / "h200.txt").read_text() == slow
    kept = plans.read_reasons(tmp_path / "reasons.toml")
    assert kept.reason == [plans.Reason("claims are off", {"h200 add-64m-fp32": (187.6, 250.0)})]
    for texts in ({"h200": slow}, {"mi300x": TEXT}, {"h200": slower(TEXT, "187.6", "240.0")}):
        assert plans.write(texts, tmp_path) == 0
        assert plans.read_reasons(tmp_path / "reasons.toml") == kept
    assert plans.check({"h200": TEXT}, tmp_path) == 1
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    assert plans.read_reasons(tmp_path / "reasons.toml") == plans.Reasons()
    assert plans.check({"h200": TEXT, "mi300x": TEXT}, tmp_path) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[reason]]\nwhy = ""\n[reason.us]\n"h200 a" = [1.0, 2.0]\n', "why"),
        ('[[reason]]\nwhy = "long enough"\n[reason.us]\n"h200 a" = [1.0]\n', "us"),
        ('[[reason]]\nbecause = "long enough"\n', "because"),
        ("[[reason", "reasons.toml"),
    ],
)
def test_file_of_reasons_is_checked(tmp_path: Path, text: str, message: str) -> None:
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    (tmp_path / "reasons.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        plans.read_reasons(tmp_path / "reasons.toml")
    assert plans.write({"h200": TEXT}, tmp_path) == 1
    assert plans.check({"h200": TEXT}, tmp_path) == 1


def test_texts_of_the_same_source_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was refused because a reason was missing stores the summaries that it computed.
    The next run, with a reason, does not compute them again.
    """
    results = []
    monkeypatch.setattr(plans, "UNWRITTEN", tmp_path / "made")
    monkeypatch.setattr(plans, "tree_digest", lambda folder: "one")
    texts = {"h200": TEXT}
    monkeypatch.setattr(plans, "describe_all", lambda machines: results.append(machines) or texts)
    words = ["h200", "--folder", str(tmp_path)]
    assert plans.main(words) == 0
    texts = {"h200": slower(TEXT, "187.6", "250.0")}
    assert plans.main(words) == 0 and len(results) == 1  # the source is unchanged
    monkeypatch.setattr(plans, "tree_digest", lambda folder: "two")
    assert plans.main(words) == 1 and plans.main([*words, "--why", "claims are off"]) == 0
    assert len(results) == 2
    assert [p.name for p in (tmp_path / "made").iterdir()] == ["h200-two.txt"]


def test_reason_that_is_too_short_is_refused(tmp_path: Path) -> None:
    assert plans.write({"h200": TEXT}, tmp_path) == 0
    assert plans.write({"h200": slower(TEXT, "187.6", "250.0")}, tmp_path, "ok") == 1
    assert (tmp_path / "h200.txt").read_text() == TEXT
