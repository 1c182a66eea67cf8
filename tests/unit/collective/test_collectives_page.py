"""docs/collectives.md and docs/collective-programs.md: their blocks run, and their commands print
the output shown.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ark
from ark.cli import main
from ark.collective.programs import CollectiveProgram, execute, to_json
from tests.pages import DOCS, commands, python_blocks, shown

SHOWN = [*commands("collectives.md"), *commands("collective-programs.md")]


def test_there_are_commands() -> None:
    assert [words[:2] for words, _ in SHOWN] == [
        ["topo", "optimal"],
        ["topo", "compare"],
        ["topo", "simulate"],
        ["topo", "synthesize"],
    ]


@pytest.mark.parametrize(("words", "lines"), SHOWN, ids=lambda v: " ".join(v)[:24])
def test_commands_print_the_output_on_the_pages(
    words: list[str],
    lines: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)  # the command writes a page here
    space: dict[str, Any] = {}
    exec(python_blocks("collective-programs.md")[0], space)
    (tmp_path / "two_shot.json").write_text(to_json(space["two_shot"]))
    assert main(words) == 0
    out = capsys.readouterr().out
    assert shown(lines, out), out


def test_programs_written_by_hand() -> None:
    language, star = python_blocks("collective-programs.md")[:2]
    space: dict[str, Any] = {}
    exec(star, space)
    assert [part.tolist() for part in space["outputs"]] == [[0.0, 1.0, 2.0]] * 4
    exec(language, space)
    inputs = [np.arange(8.0) + rank for rank in range(2)]
    for got in execute(space["two_shot"], inputs):
        np.testing.assert_array_equal(got, 2 * np.arange(8.0) + 1)


def test_synthesis_and_a_models_collectives() -> None:
    synthesis, calls = python_blocks("collectives.md")
    space: dict[str, Any] = {"ark": ark, "rank": 0, "world_size": 8}
    exec(synthesis, space)
    assert isinstance(space["program"], CollectiveProgram)
    with ark.use_model(ark.Model(0, 8)):
        space["x"] = ark.tensor([16, 4])
        exec(calls, space)
        assert space["z"].shape() == [128, 4]


def test_sketch_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (DOCS / "collective-programs.md").read_text()
    (sketch,) = re.findall(r"```json\n(.*?)```", page, re.S)
    (command,) = re.findall(r"`ark (topo\ssynthesize [^`]*odd\.json[^`]*)`", page)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd.json").write_text(sketch)
    assert main(command.split()) == 0
    senders = re.findall(r"^rank (\d+)$(.*?)(?=^rank|\Z)", capsys.readouterr().out, re.M | re.S)
    to_the_other_box = {
        int(rank)
        for rank, operations in senders
        for peer in re.findall(r"put .* -> r(\d+) ", operations)
        if int(peer) // 8 != int(rank) // 8
    }
    assert to_the_other_box and all(rank % 2 for rank in to_the_other_box)
