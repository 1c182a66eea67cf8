"""The list of passes: their order, their results, that a second run changes nothing, and the folder
that `ark plan --passes` writes.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

import ark
from ark import ops
from ark.backend import registry
from ark.cli import main
from ark.cli.measure.cases import lstm
from ark.cli.measure.ops import planned
from ark.ir.dtype import bf16
from ark.ir.graph import Graph
from ark.ir.text import to_text
from ark.lower import rewrite
from ark.lower.observe import observed
from ark.lower.passes import PASSES
from ark.lower.prepare import prepare
from ark.lower.rewrite.context import Context
from ark.models.build import Shape, build
from ark.models.config import builtin_config
from tests import programs
from tests.cases.page_in_browser import CHROMIUM, width_on_a_phone
from tests.slow import slow
from tests.unit.lower.passes import cases

SHARED = {
    "__init__",
    "attention_backward",
    "attention_recognised",
    "attention_gradients",
    "context",
    "convolutions",
    "copies",
    "few_channels",
    "image_concats",
    "image_layouts",
    "join_reductions",
    "makers",
    "masks",
    "odd_rows",
    "row_regions",
    "strided",
    "turned_images",
    "views",
    "weight_gradients",
}
RUNS = {step.name: step.run for step in PASSES}
MACHINES = ("h200", "mi300x", "cpu-2")


def test_every_pass_follows_those_that_it_needs() -> None:
    seen: set[str] = set()
    for step in PASSES:
        assert set(step.needs) <= seen, step.name
        seen.add(step.name)
    assert len(seen) == len(PASSES)


def test_every_module_of_rewrites_is_a_pass() -> None:
    assert rewrite.__file__ is not None
    modules = {p.stem for p in Path(rewrite.__file__).parent.glob("*.py")} - SHARED
    assert {step.run.__module__.rpartition(".")[2] for step in PASSES} <= {
        *modules,
        "variant_passes",
    }
    names = {step.name.replace("unit_", "") for step in PASSES}
    assert modules == names


def test_no_lowering_looks_at_tasks_of_earlier_nodes() -> None:
    assert ops.__file__ is not None
    sources = Path(ops.__file__).parent.rglob("*.py")
    assert [p.name for p in sources if "lowering.groups" in p.read_text()] == []


def _graphs() -> list[Graph]:
    config = builtin_config("llama-3.2-1b")
    decoders = [build(Shape(config, bf16, 64, 16, 0, world)).graph for world in (1, 2)]
    others = []
    for seed in range(8):
        model = ark.Model()
        with ark.use_model(model):
            programs.build(seed, 24)
        others.append(model.graph)
    return [*decoders, *others]


@pytest.mark.parametrize("machine", MACHINES)
def test_second_run_of_a_pass_changes_nothing(machine: str) -> None:
    watched: defaultdict[str, int] = defaultdict(int)

    def run_again(name: str, before: Graph, after: Graph, context: Context) -> None:
        text = to_text(after)
        watched[name] += text != to_text(before)
        assert to_text(RUNS[name](after, context)) == text, name

    with observed(run_again):
        for graph in _graphs():
            prepare(graph, registry.machine(machine), {"lockstep": True})
    assert sum(n > 0 for n in watched.values()) >= 4


@pytest.mark.parametrize("machine", MACHINES)
def test_pass_that_does_not_run_would_change_nothing(machine: str) -> None:
    stages = {step.name: step.stage for step in PASSES}
    left_out: set[str] = set()

    def run_others(name: str, before: Graph, after: Graph, context: Context) -> None:
        for step in (s for s in PASSES if s.stage is stages[name] and not s.applies(after)):
            left_out.add(step.name)
            assert to_text(step.run(after, context)) == to_text(after), (name, step.name)

    with observed(run_others):
        for graph in (*_graphs(), *map(cases.graph_of, cases.CASES)):
            prepare(graph, registry.machine(machine), {"lockstep": True})
    assert left_out == {step.name for step in PASSES if step.over}


@pytest.mark.parametrize("machine", MACHINES)
def test_pass_makes_no_node_that_another_one_gives(machine: str) -> None:
    given = {kind: step.name for step in PASSES for kind in step.gives}

    def look(name: str, before: Graph, after: Graph, context: Context) -> None:
        new = {n.type for n in after.nodes} - {n.type for n in before.nodes}
        assert all(given.get(kind, name) == name for kind in new), (name, new)

    with observed(look):
        for graph in _graphs():
            prepare(graph, registry.machine(machine), {"lockstep": True})
        planned(lstm(2, 4, 64), registry.machine(machine))


def test_plan_writes_the_graph_after_each_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "passes"
    command = ["plan", "llama-3.2-1b", "--machine", "h200", "--context", "64", "--chunk", "0"]
    assert main([*command, "--passes", str(folder)]) == 0
    assert "passes changed the graph" in capsys.readouterr().err
    texts = sorted(p.name for p in folder.glob("*.txt"))
    assert texts[0] == "00-graph.txt" and texts[2].endswith("-fuse_linear.txt")
    assert "= linear(" in (folder / texts[2]).read_text()
    page = (folder / "index.html").read_text()
    assert "<script" not in page and "http" not in page and "fuse_linear" in page
    assert "<table tabindex=0>" in page  # so that the keyboard can scroll a wide table


@slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_page_of_passes_fits_a_phone(tmp_path: Path) -> None:
    command = ["plan", "llama-3.2-1b", "--machine", "h200", "--context", "64", "--chunk", "0"]
    assert main([*command, "--passes", str(tmp_path)]) == 0
    assert width_on_a_phone(tmp_path / "index.html") <= 390


def test_plan_file_has_no_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}")
    assert main(["plan", str(path), "--passes", str(tmp_path / "out")]) == 2
    assert "a plan file has no passes" in capsys.readouterr().err
