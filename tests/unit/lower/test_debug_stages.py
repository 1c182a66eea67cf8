"""ARK_DEBUG=passes,lower,plan,codegen: each stage prints its own decisions only."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

import ark
from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.frontend.model import Model, use_model
from ark.log import STAGES
from ark.lower.pipeline import plan
from ark.plan.cost import predict
from ark.plan.serialize import machine_of
from ark.plan.types import Plan

Printed = Callable[..., tuple[Plan, str, str]]


def compiled(machine: str) -> tuple[Plan, str]:
    """Plans and emits a small program. Returns the plan and the source of relu(x @ w) and a
    softmax.
    """
    model = Model()
    with use_model(model):
        x, w = ark.tensor([512, 1024], ark.bf16), ark.parameter([1024, 1024], ark.bf16)
        ark.softmax(ark.relu(ark.matmul(x, w)))
    target = registry.machine(machine)
    planned = plan(model.graph, target)
    dialect = registry.get(target.backend).dialect(target.arch)  # type: ignore[attr-defined]
    return planned, write(planned, machine_of(planned, 0), dialect).source.text


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Printed:
    def run(stages: str, machine: str = "h200") -> tuple[Plan, str, str]:
        monkeypatch.setenv("ARK_DEBUG", stages)
        return (*compiled(machine), capsys.readouterr().err)

    return run


def test_nothing_is_printed_unless_asked(printed: Printed) -> None:
    assert printed("")[2] == ""


@pytest.mark.parametrize("stage", STAGES)
def test_stage_prints_its_own_lines(printed: Printed, stage: str) -> None:
    lines = printed(stage)[2].splitlines()
    assert lines
    assert all(line.startswith(f"ark {stage}: ") for line in lines)


def test_passes_are_shown_with_changed_ops(printed: Printed) -> None:
    assert "ark passes: fuse_epilogues: 3 -> 2 ops: relu -1\n" in printed("passes")[2]


def test_fastest_cut_is_shown_before_slower_ones(printed: Printed) -> None:
    planned, _, text = printed("lower")
    rows, columns = next(op.params["tile"] for op in planned.ops if op.kind == "matmul")
    line = next(line for line in text.splitlines() if "product 1x1x512x1024x1024" in line)
    assert f"tiles {rows}x{columns}" in line
    times = [float(us) for us in re.findall(r"([0-9.]+) us", line)]
    assert len(times) == 3
    assert times == sorted(times)


def test_variant_is_shown_with_the_others_refusals(printed: Printed) -> None:
    _, _, text = printed("lower")
    assert "phase main: not roles: matmul is a product of 512 rows\n" in text
    (chosen,) = re.findall(r"phase main: variant matrix: .*: (.*) us, and (.*) under block\n", text)
    (other,) = re.findall(r"phase main: not block: predicted (.*) us\n", text)
    assert float(chosen[0]) < float(chosen[1]) == float(other)


def test_reasons_are_those_of_each_phase(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    with use_model(model):
        weight = ark.parameter([1024, 1024], ark.bf16, name="weight")
        for name, rows in (("prompt", 128), ("decode", 1)):
            with model.graph.entry(name):
                ark.linear(ark.tensor([rows, 1024], ark.bf16), weight, name="layer")
    monkeypatch.setenv("ARK_DEBUG", "lower")
    plan(model.graph, registry.machine("h200"))
    text = capsys.readouterr().err
    for line in (
        "phase prompt: variant matrix: it reads prompts: ",
        "phase prompt: not roles: prompt.layer is a product of 128 rows",
        "phase decode: variant roles: it decodes: its 1 products are linear layers of one row",
        f"phase decode: not block: it streams the same {2 * 1024**2:,} bytes of weights, ",
        "phase decode: not matrix: decode.layer is a linear layer of few rows",
        "phase prompt: product 1x1x128x1024x1024: ",
    ):
        assert f"ark lower: {line}" in text, text


def test_plan_is_shown_as_it_is(printed: Printed) -> None:
    planned, _, text = printed("plan", "mi300x")
    us = max(span.end for span in predict(planned, 0))
    lists = planned.phases[0].processors
    first, *slowest = text.splitlines()
    assert first == (
        f"ark plan: phase main: predicted {us:.4g} us, {sum(map(len, lists))} tasks, "
        f"{sum(map(bool, lists))} of {len(lists)} task lists busy"
    )
    names = {op.name: i for i, op in enumerate(planned.ops)}
    shown = [
        re.fullmatch(r"ark plan:   (\S+): (\S+) us from .*; (\d+) tasks .*", s) for s in slowest
    ]
    slow = [m.groups() for m in shown if m is not None]
    assert len(slow) == len(slowest) == min(5, len(planned.ops))
    times = [float(us) for _, us, _ in slow]
    assert times == sorted(times, reverse=True)
    for name, _, tasks in slow:
        assert int(tasks) == sum(t.op == names[name] for listed in lists for t in listed)


def test_alike_ops_and_decisions_are_shown_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model()
    with use_model(model):
        x = ark.tensor([512, 1024], ark.bf16)
        for number in range(3):
            x = ark.linear(x, ark.parameter([1024, 1024], ark.bf16, name=f"w{number}"))
    monkeypatch.setenv("ARK_DEBUG", "lower")
    plan(model.graph, registry.machine("h200"))
    text = capsys.readouterr().err
    assert text.count("3 times: product 1x1x512x1024x1024: ") == 1
    assert text.count("w0 and 2 more: matmul of 512x1024, 1024x1024, 512x1024: tiles ") == 1


@pytest.mark.parametrize(("rows", "engine"), [(16, "packet"), (4096, "threads")])
def test_engine_is_shown_with_the_other_and_why(
    rows: int, engine: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(rank=0, world_size=2)
    with use_model(model):
        ark.all_reduce(ark.tensor([rows, 1024], ark.fp32), 0, 2)
    monkeypatch.setenv("ARK_DEBUG", "lower")
    plan(model.graph, registry.machine("h200"))
    other = {"packet": "threads", "threads": "packet"}[engine]
    assert (
        f"{rows * 4096} bytes to peers: engine {engine}, not {other}: up to 524288 bytes are "
        "faster as packets\n"
    ) in capsys.readouterr().err


def test_source_is_shown_with_its_size(printed: Printed) -> None:
    _, source, text = printed("codegen", "mi300x")
    assert f"{len(source):,} characters; bodies: elementwise 1, matmul 1, row_norm 1\n" in text


def test_unknown_stage_is_a_warning_with_the_known_ones(printed: Printed) -> None:
    _, _, text = printed("plan, lowering")
    assert text.splitlines()[0] == (
        "ark warn: ARK_DEBUG names 'lowering', which is not a stage; the stages are "
        "passes, lower, plan, codegen"
    )
    assert text.count("lowering") == 1
    assert "ark plan: " in text
