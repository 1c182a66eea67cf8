"""Layouts: the counts published in papers, shortest paths by networkx, and each step executed on
arrays.
"""

from __future__ import annotations

import itertools
import json
import math

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.cli import main
from ark.errors import BaseError, InvalidUsageError, UnsupportedError
from ark.parallel import Layout, change, table
from ark.parallel.layout.types import layouts
from tests.unit.parallel import layouts_in_numpy


def counts(*numbers: int) -> Layout:
    return Layout(numbers[0], numbers[1], numbers[2:])


@pytest.mark.parametrize(
    ("before", "after", "op", "elements"),
    [
        ((1, 4, 1, 1), (4, 1, 1, 1), "all_reduce", 6144),
        ((1, 4, 1, 1), (1, 1, 4, 1), "reduce_scatter", 3072),
        ((1, 1, 4, 1), (1, 1, 1, 4), "all_to_all", 768),
        ((1, 1, 4, 1), (4, 1, 1, 1), "all_gather", 3072),
        ((4, 1, 1, 1), (1, 1, 4, 1), "slice", 0),
        ((4, 1, 1, 1), (1, 4, 1, 1), "value_split", 0),
    ],
)
def test_traffic_of_single_steps_equals_the_papers(
    before: tuple[int, ...], after: tuple[int, ...], op: str, elements: int
) -> None:
    (step,) = change((64, 64), counts(*before), counts(*after))
    assert (step.op, step.elements, step.groups) == (op, elements, ((0, 1, 2, 3),))


def reference(shape: tuple[int, ...], devices: int) -> networkx.DiGraph:
    """Returns the graph of layouts with the edges of the papers, in exact numbers of elements of
    all devices.
    """
    graph = networkx.DiGraph()
    nodes = [
        c
        for c in itertools.product(range(1, devices + 1), repeat=2 + len(shape))
        if math.prod(c) == devices and not any(n % p for n, p in zip(shape, c[2:], strict=True))
    ]
    for a, b in itertools.permutations(nodes, 2):
        changed = [i for i in range(len(a)) if a[i] != b[i]]
        if len(changed) != 2:
            continue
        down, up = sorted(changed, key=lambda i: b[i] - a[i])
        if a[down] % b[down]:
            continue
        c, local = a[down] // b[down], math.prod(shape) // math.prod(a[2:])
        kinds = "".join("RV"[i] if i < 2 else "D" for i in (down, up))
        volume = {
            "DR": (c - 1) * local * c,
            "DD": (c - 1) * local,
            "VR": 2 * (c - 1) * local,
            "VD": (c - 1) * local,
            "RD": 0,
            "RV": 0,
        }.get(kinds)
        if volume is not None:
            graph.add_edge(a, b, weight=volume * (devices // c))
    return graph


@pytest.mark.parametrize(("shape", "devices"), [((64, 64), 16), ((12, 8), 12), ((4, 6, 8), 8)])
def test_volumes_are_those_of_a_shortest_path(shape: tuple[int, ...], devices: int) -> None:
    actual = table(shape, devices)
    graph = reference(shape, devices)
    lengths = dict(networkx.all_pairs_dijkstra_path_length(graph))
    assert len(actual.layouts) == len(graph)
    for i, a in enumerate(actual.layouts):
        for j, b in enumerate(actual.layouts):
            assert actual.elements[i, j] * devices == lengths[a.counts][b.counts]


def test_steps_add_up_to_the_table() -> None:
    actual = table((64, 64), 8)
    for i, a in enumerate(actual.layouts):
        for j, b in enumerate(actual.layouts):
            steps = change((64, 64), a, b)
            assert sum(s.elements for s in steps) == actual.elements[i, j]
            assert [s.before for s in steps[1:]] == [s.after for s in steps[:-1]]
            assert (steps[-1].after if steps else a) == b


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_values_after_the_steps_are_the_logical_tensor(data: st.DataObject) -> None:
    devices = data.draw(st.sampled_from([1, 2, 4, 6, 8, 12, 16, 24]))
    sizes = st.sampled_from([1, 4, 6, 8, 12, 24])
    shape = tuple(data.draw(st.lists(sizes, min_size=1, max_size=3)))
    choices = list(layouts(shape, devices))
    before, after = data.draw(st.sampled_from(choices)), data.draw(st.sampled_from(choices))
    random = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    parts = [random.integers(-99, 99, shape) for _ in range(before.values)]
    steps = change(shape, before, after)
    held, _ = layouts_in_numpy.run(layouts_in_numpy.scatter(parts, before), steps)
    at = layouts_in_numpy.places(before, steps)
    blocks = {tuple(row) for row in at.tolist()}
    assert blocks == {tuple(row) for row in after.coordinates().tolist()}
    assert {s.shape for s in held} == {after.block(shape)}
    for replica in layouts_in_numpy.gather(held, after, at, shape):
        np.testing.assert_array_equal(replica, sum(parts))
    assert layouts_in_numpy.replicas_agree(held, at)


def test_omitted_step_is_detected() -> None:
    """Shows that the comparison of the tests above would notice a missing step: if no step of a
    layout change is executed, the array is not the sum.
    """
    before, after = counts(1, 4, 1, 1), counts(4, 1, 1, 1)
    parts = [np.full((4, 4), i) for i in range(4)]
    held, _ = layouts_in_numpy.run(layouts_in_numpy.scatter(parts, before), [])
    whole = layouts_in_numpy.gather(held, after, after.coordinates(), (4, 4))
    assert not np.array_equal(whole[0], sum(parts))


@settings(max_examples=30)
@given(st.from_regex(r"R?[0-9]{1,2}V[0-9٤]D[0-9]{1,2}(,[0-9]{0,2}){0,3}", fullmatch=True))
def test_text_is_a_layout_or_refused(text: str) -> None:
    try:
        result = Layout.parse(text)
    except InvalidUsageError:
        return
    assert Layout.parse(str(result)) == result


def test_layouts_print_as_they_are_read() -> None:
    for layout in layouts((8, 12), 8):
        assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("shape", "before", "after", "error", "says"),
    [
        ((64, 64), "R1V4D1,1", "R1V2D1,1", InvalidUsageError, "over 4 devices"),
        ((64, 6), "R1V4D1,1", "R1V1D1,4", InvalidUsageError, "use a divisor of 6"),
        ((64,), "R1V4D1,1", "R1V1D1,4", InvalidUsageError, "one split per dimension"),
        ((1 << 16,) * 8, "R65536V1D1,1,1,1,1,1,1,1", "", UnsupportedError, "limit of the search"),
    ],
)
def test_invalid_layouts_are_refused(
    shape: tuple[int, ...], before: str, after: str, error: type[BaseError], says: str
) -> None:
    with pytest.raises(error, match=says):
        change(shape, Layout.parse(before), Layout.parse(after or before))


def test_command_prints_the_object(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--shape", "64x64", "--from", "R1V4D1,1", "--to", "R4V1D1,1"]
    assert main([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output) == ["steps", "elements"] and output["elements"] == 6144
    assert [step["op"] for step in output["steps"]] == ["all_reduce"]
    assert main(words) == 0
    assert "all reduce among 4, 6144" in capsys.readouterr().out


def test_command_counts_parts_of_elements(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["layout", "--shape", "1x1", "--from", "R1V4D1,1", "--to", "R4V1D1,1", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["elements"] == 1.5


@pytest.mark.parametrize(
    ("shape", "before", "says"),
    [
        ("64x", "R1V4D1,1", "is not a shape"),
        ("0x64", "R1V4D1,1", "between 1 and 2^40"),
        ("64x64", "R1V4", "is not a layout"),
        ("64x64", "R0V4D1,1", "at least 1"),
        ("64x64", "R1V99999999D1,1", "at most 65536"),
        ("64x64", "R1V٤D1,1", "is not a layout"),
    ],
)
def test_bad_words_are_one_paragraph(
    shape: str, before: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["layout", "--shape", shape, "--from", before, "--to", "R4V1D1,1"]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert says in err and "Traceback" not in err
