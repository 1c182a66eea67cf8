"""Pipelines: published periods and makespans, brute force over small ones, and invalid inputs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.cli import main
from ark.errors import BaseError, InvalidUsageError, ModelError, PlanError
from ark.parallel.pipeline import Block, Placement, shape, tessel, verify
from ark.parallel.pipeline.named import Spans, named
from tests.slow import slow


@pytest.mark.parametrize(
    ("name", "memory", "period", "makespan"),
    [
        ("V", 1, 16, 128),
        ("V", 2, 8, None),
        ("V", 3, 8, None),
        ("V", 4, 4, 4 * 8 + 12),
        ("V", 6, 4, 4 * 8 + 12),
        pytest.param("X", 4, 8, 8 * 8 + 6, marks=slow),
        ("X", 6, 8, 68),  # the paper has 8 * 8 + 6
        pytest.param("M", 5, 6, None, marks=slow),
        ("M", 6, 6, None),
    ],
)
def test_published_periods(name: str, memory: int, period: int, makespan: int | None) -> None:
    schedule = tessel(shape(name), memory, 8)
    assert (schedule.period, schedule.optimal) == (period, True)
    assert makespan is None or schedule.makespan == makespan
    assert schedule.makespan_bound <= schedule.makespan


@pytest.mark.parametrize(
    ("memory", "count", "makespan", "exact"),
    [
        (4, 8, 4 * 8 + 6, True),
        (4, 100, 4 * 100 + 6, True),  # nnScaler's 4N + 6
        (2, 8, 42, True),
        (2, 100, 412, False),
    ],
)
def test_3f1b_is_complete_or_says_how_far_it_may_be_off(
    memory: int, count: int, makespan: int, exact: bool
) -> None:
    placement = named("3f1b", 4, Spans(1, 1)).placement
    schedule = tessel(placement, memory, count)
    assert schedule.makespan <= makespan
    assert (schedule.makespan == schedule.makespan_bound) == exact
    if count < 10:
        assert holds(
            placement, memory, {(e.block, e.micro_batch): e.start for e in schedule.entries}
        )


@pytest.mark.parametrize("name", ["V", "X", "M", "NN", "K"])
def test_forward_only_takes_the_load_of_a_device(name: str) -> None:
    placement = shape(name, inference=True)
    schedule = tessel(placement, 0, 6)
    assert schedule.period == max(placement.load(d) for d in range(4)) and schedule.optimal


@pytest.mark.parametrize(
    ("name", "memory", "period", "makespan"),
    [
        ("V", 8, 4, 60),
        pytest.param("M", 8, 8, None, marks=slow),
        ("K", 8, 6, 60),
        pytest.param("X", 8, 8, None, marks=slow),
        pytest.param("M", 9, 7, None, marks=slow),
        pytest.param("NN", 8, 10, None, marks=slow),
        pytest.param("NN", 9, 10, None, marks=slow),
    ],
)
def test_eight_devices_and_micro_batches_with_proof(
    name: str, memory: int, period: int, makespan: int | None
) -> None:
    """The periods of pipeline schedules for eight devices and micro-batches equal the known
    periods, and the solver proves them optimal. The brute-force test below checks such proofs.
    """
    placement = shape(name, 8)
    schedule = tessel(placement, memory, 8)
    assert (schedule.period, schedule.optimal) == (period, True)
    assert makespan in (None, schedule.makespan)
    assert verify(placement, [memory] * 8, 8, schedule.entries) is None


def holds(placement: Placement, memory: int, starts: dict[tuple[str, int], int]) -> bool:
    """True if a schedule keeps all dependences and the memory limit. It checks each time step,
    independently of ark's own check.
    """
    by_name = {b.name: b for b in placement.blocks}
    for (name, m), start in starts.items():
        if any(start < starts[a, m] + by_name[a].span for a in by_name[name].after):
            return False
    end = max(s + by_name[n].span for (n, _), s in starts.items())
    for device in range(placement.devices):
        held = 0
        for time in range(min(starts.values()), end):
            now = [by_name[n] for (n, _), s in starts.items() if s <= time < s + by_name[n].span]
            if sum(device in block.devices for block in now) > 1:
                return False
            held += sum(
                by_name[n].memory
                for (n, _), s in starts.items()
                if s == time and device in by_name[n].devices
            )
            if held > memory:
                return False
    return True


def brute_force(placement: Placement, memory: int) -> int:
    """Returns the smallest period, by trying all start times of a micro-batch and repeating
    them.
    """
    blocks = placement.blocks
    latest = sum(b.span for b in blocks)
    for period in itertools.count(max(placement.load(d) for d in range(placement.devices))):
        for starts in itertools.product(range(latest + 1), repeat=len(blocks) - 1):
            one = dict(zip((b.name for b in blocks), (0, *starts), strict=True))
            repeated = {(n, m): s + m * period for m in range(6) for n, s in one.items()}
            if holds(placement, memory, {(n, 0): s for n, s in one.items()}) and holds(
                placement, memory, repeated
            ):
                return period
    raise AssertionError


SMALL = {
    "two stages": shape("V", 2, 1, 1),
    "one stage in two": Placement(
        2,
        (
            Block("f", 1, 1, (0,)),
            Block("g", 1, 0, (1,), ("f",)),
            Block("b", 2, -1, (0,), ("g",)),
        ),
    ),
    "both ways": Placement(
        2,
        (
            Block("f", 1, 2, (0,)),
            Block("g", 2, 0, (0, 1), ("f",)),
            Block("b", 1, -2, (0,), ("g",)),
        ),
    ),
}


@pytest.mark.parametrize("memory", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SMALL)
def test_brute_force_finds_no_shorter_period(name: str, memory: int) -> None:
    placement = SMALL[name]
    if max(b.memory for b in placement.blocks) > memory:
        with pytest.raises(PlanError, match="a single micro-batch"):
            tessel(placement, memory, 4)
        return
    assert tessel(placement, memory, 4).period == brute_force(placement, memory)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    devices = draw(st.integers(1, 3))
    blocks: list[Block] = []
    for i in range(draw(st.integers(1, 3))):
        here = draw(st.sets(st.integers(0, devices - 1), min_size=1))
        after = tuple(b.name for b in blocks if draw(st.booleans()))
        taken = draw(st.integers(0, 2))
        blocks.append(Block(f"f{i}", draw(st.integers(1, 3)), taken, tuple(sorted(here)), after))
    for block in list(blocks):
        after = (block.name, *(b.name for b in blocks if draw(st.booleans()) and b != block))
        span = draw(st.integers(1, 3))
        blocks.append(Block(f"b{block.name}", span, -block.memory, block.devices, after))
    return Placement(devices, tuple(blocks)).checked()


@settings(max_examples=12, deadline=None)
@given(placements(), st.integers(2, 8), st.integers(1, 5))
def test_random_schedules_hold(placement: Placement, memory: int, count: int) -> None:
    try:
        schedule = tessel(placement, memory, count)
    except PlanError:
        return
    starts = {(e.block, e.micro_batch): e.start for e in schedule.entries}
    assert len(starts) == count * len(placement.blocks)
    assert holds(placement, memory, starts)
    assert schedule.makespan >= schedule.makespan_bound
    assert schedule.period >= max(placement.load(d) for d in range(placement.devices))


def test_verifier_detects_invalid_schedules() -> None:
    placement = shape("V")
    schedule = tessel(placement, 4, 4).entries
    assert verify(placement, [4] * 4, 4, schedule) is None
    assert "entries" in (verify(placement, [4] * 4, 4, schedule[1:]) or "")
    assert "holds" in (verify(placement, [3] * 4, 4, schedule) or "")
    early = tuple(dataclasses.replace(e, start=0) if e.block == "f3" else e for e in schedule)
    assert "has ended" in (verify(placement, [4] * 4, 4, early) or "")
    late = tuple(
        dataclasses.replace(e, start=e.start + 1) if e.block == "b0" else e for e in schedule
    )
    moved = tuple(
        dataclasses.replace(e, start=late[0].start) if e.block == "f0" and e.micro_batch else e
        for e in late
    )
    assert "which is busy" in (verify(placement, [9] * 4, 4, moved) or "")


def test_too_little_time_states_a_gap() -> None:
    schedule = tessel(shape("X", 8), 5, 8, time_limit_s=0.8)
    assert not schedule.optimal and 8 <= schedule.period_bound < schedule.period


@pytest.mark.parametrize("name", ["K", pytest.param("NN", marks=slow)])
def test_same_schedule_every_time(name: str) -> None:
    assert tessel(shape(name), 5, 6) == tessel(shape(name), 5, 6)


def test_spans_in_any_unit() -> None:
    assert tessel(shape("V", 4, 1000, 3000), 4, 5).makespan == 1000 * (4 * 5 + 12)


BLOCK = {"name": "a", "span": 1, "memory": 1, "devices": [0], "after": []}
FREE = {"name": "b", "span": 1, "memory": -9, "devices": [0], "after": ["a"]}


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"devices": 1, "blocks": []}, "length >= 1"),
        ({"devices": 0, "blocks": [BLOCK]}, "`int` >= 1"),
        ({"devices": 1, "blocks": [{**BLOCK, "span": 0}]}, "`int` >= 1"),
        ({"devices": 1, "blocks": [{**BLOCK, "span": 1.5}]}, "Expected `int`"),
        ({"devices": 1, "blocks": [{**BLOCK, "span": "1"}]}, "Expected `int`"),
        ({"devices": 1, "blocks": [{**BLOCK, "colour": "red"}]}, "unknown field `colour`"),
        ({"devices": 1, "blocks": [{"name": "a"}]}, "missing required field `span`"),
        ({"devices": 1, "blocks": [{**BLOCK, "devices": [1]}]}, "be one of 0 to 0"),
        ({"devices": 1, "blocks": [{**BLOCK, "devices": [0, 0]}]}, "listed once"),
        ({"devices": 1, "blocks": [{**BLOCK, "after": ["b"]}]}, "which does not exist"),
        ({"devices": 1, "blocks": [{**BLOCK, "after": ["a"]}]}, "wait for each other"),
        ({"devices": 1, "blocks": [BLOCK, BLOCK]}, "two blocks have the name 'a'"),
        ({"devices": 1, "blocks": [{**BLOCK, "memory": 9}, FREE]}, "a single micro-batch"),
        ({"devices": 1, "blocks": [{**BLOCK, "memory": -1}]}, "before it was allocated"),
        ({"devices": 1, "blocks": [BLOCK]}, "leave 7 of the 4 units of memory"),
        ([], "Expected `object`"),
    ],
)
def test_bad_files_are_one_paragraph(
    value: Any, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(value))
    assert main(["tessel", str(path), "--memory", "4", "--micro-batches", "8"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert says in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("placement", "memory", "count", "error"),
    [
        (shape("V"), -1, 8, InvalidUsageError),
        (shape("V"), [1, 2], 8, InvalidUsageError),
        (shape("V"), 4, 0, InvalidUsageError),
        (shape("V"), 4, 1 << 40, InvalidUsageError),
        (Placement(1, (Block("a", 1), Block("a", 1))), 4, 1, ModelError),
    ],
)
def test_bad_arguments_are_refused(
    placement: Placement, memory: Any, count: int, error: type[BaseError]
) -> None:
    with pytest.raises(error):
        tessel(placement, memory, count)


def test_command_prints_the_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = [
        {"name": "f", "span": 1, "memory": 1, "devices": [0], "after": []},
        {"name": "b", "span": 3, "memory": -1, "devices": [0], "after": ["f"]},
    ]
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({"devices": 1, "blocks": blocks}))
    words = ["tessel", str(path), "--memory", "1", "--micro-batches", "2"]
    assert main([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output) == ["period", "makespan", "optimal", "schedule"]
    assert (output["period"], output["makespan"], output["optimal"]) == (4, 8, True)
    assert [e["start"] for e in output["schedule"]] == [0, 1, 4, 5]
    assert main(words) == 0
    assert "   0 0aaa1bbb" in capsys.readouterr().out
