"""docs/parallel.md, pipelines.md and predictions.md: blocks that need no model run, and commands
print the output shown.
"""

from __future__ import annotations

import functools
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
    for page in ("parallel.md", "pipelines.md", "predictions.md")
    for words, lines in commands(page)
    if "DIR" not in words
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


def test_blocks_of_a_pipeline_are_named_by_scopes() -> None:
    (text,) = (b for b in python_blocks("parallel.md") if 'scope("f0-3")' in b)
    scope, _, plan = text.partition("...\n")
    space: dict[str, Any] = {"ark": ark}
    with ark.use_model(ark.Model(0, 1)) as model:
        space["model"] = model
        weights = [ark.parameter([8, 8]) for _ in range(8)]
        for micro_batch in range(4):
            space["h"] = ark.tensor([4, 8])
            blocks = [f"f{stage}" for stage in range(4)] + [f"b{stage}" for stage in (3, 2, 1, 0)]
            for block, weight in zip(blocks, weights, strict=True):
                space["layer"] = functools.partial(ark.linear, weight=weight)
                exec(scope.replace("f0-3", f"{block}-{micro_batch}"), space)
    assert ark.parallel.place_of(model.graph.nodes[0]) == ("f0", 0)
    exec(plan, space)
    assert [len(own.nodes) > 8 for own in space["made"].ranks.graphs] == [True] * 4
