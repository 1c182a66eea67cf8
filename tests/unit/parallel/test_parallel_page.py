"""docs/parallel.md, pipelines.md and predictions.md: blocks that need no model run, and commands
print the output shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import ark
from ark.cli import main
from ark.parallel import shape
from tests.pages import commands, python_blocks, shown

SHOWN = [
    (words, lines)
    for page in ("parallel.md", "pipelines.md")
    for words, lines in commands(page)
    if words[0] in ("layout", "tessel")
]


@pytest.mark.parametrize(("words", "lines"), SHOWN, ids=lambda v: " ".join(v)[:24])
def test_commands_print_the_output_on_the_page(
    words: list[str],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("placement.json").write_bytes(msgspec.json.encode(shape("V", devices=4)))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert shown(lines, out), out


def test_layouts_and_schedules() -> None:
    layouts, transform = python_blocks("parallel.md")[:2]
    (schedule,) = python_blocks("pipelines.md")
    space: dict[str, Any] = {"ark": ark}
    exec(layouts, space)
    (step,) = space["change"]((64, 64), space["before"], space["after"])
    assert (step.op, step.elements) == ("all_reduce", 6144)
    assert len(space["table"]((64, 64), 64).elements) == 84
    exec(schedule, space)
    actual = space["found"]
    assert (actual.period, actual.makespan, actual.optimal) == (4, 44, True)
    model = ark.Model(0, 1)
    with ark.use_model(model):
        up, down = ark.tensor([32, 16]), ark.tensor([16, 32])
        ark.linear(ark.relu(ark.linear(ark.tensor([8, 16]), up)), down)
    space["model"] = model
    exec(transform, space)
    assert len(space["graphs"]) == 2
