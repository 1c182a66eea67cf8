"""Collective programs written as text, JSON and XML and read back, and their execution compared
with NumPy.
"""

import dataclasses
import functools
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective import classics
from ark.collective.programs import (
    IN,
    OUT,
    TARGETS,
    Collective,
    Kind,
    ProgramBuilder,
    Span,
    check,
    dump,
    execute,
    final_writers,
    from_json,
    reference_result,
    steps,
    to_json,
    to_xml,
)
from ark.collective.programs.values import coarsened, flow
from ark.collective.synthesis import synthesize
from ark.collective.topology import named
from ark.errors import InvalidUsageError, ModelError, UnsupportedError
from tests.cases.collective_programs import any_program, boxes_for


def ring3():
    return classics.build("ring", "all_reduce", 3)


def test_builder_finds_dependencies_across_ranks():
    b = ProgramBuilder("twice", "broadcast", 2, 1, root=0)
    slot = b.scratch(1)
    b.copy(0, Span(IN, 0), Span(OUT, 0))
    first = b.put(0, 1, Span(IN, 0), Span(slot, 0))
    read = b.copy(1, Span(slot, 0), Span(OUT, 0))
    second = b.put(0, 1, Span(OUT, 0), Span(slot, 0))
    program = b.build()
    check(program)
    assert program.op(read).deps == (first,)
    assert first in program.op(second).deps  # write after write
    assert read in program.op(second).deps  # write after read, on the other rank


def test_text_dump_names_waits_signals_and_routes():
    b = ProgramBuilder("tiny", "broadcast", 2, 1, root=0)
    b.copy(0, Span(IN, 0), Span(OUT, 0))
    b.put(0, 1, Span(OUT, 0), Span(OUT, 0), route=("g0", "s0", "g1"))
    assert dump(b.build()) == (
        "program tiny: broadcast root 0, 2 ranks, 1 chunks, 1 pieces\n"
        "buffer in: 1 slots, in\n"
        "buffer out: 1 slots, out\n"
        "rank 0\n"
        "     0  step   0  copy in[0] -> out[0]\n"
        "     1  step   0  put out[0] -> r1 out[0]  after 0  signal r1  via g0>s0>g1\n"
        "rank 1\n"
    )
    text = dump(ring3())
    assert "wait r2.0" in text and "after 1" in text and "signal r1" in text


@settings(max_examples=60, deadline=None)
@given(any_program())
def test_json_round_trip_is_equal_and_deterministic(program):
    text = to_json(program)
    reread = from_json(text)
    assert reread == program
    assert to_json(reread) == text
    json.loads(text)


def _broken(change):
    raw = json.loads(to_json(ring3()))
    change(raw)
    return json.dumps(raw)


BROKEN = {
    "not json": (lambda r: None, "valid JSON"),
    "format": (lambda r: r.update(format="x"), "format: Invalid enum value"),
    "unknown field": (lambda r: r.update(colour=1), "'colour'"),
    "unknown op field": (lambda r: r["operations"][1][0].update(x=1), r"operations\[1\]\[0\]"),
    "no ranks": (lambda r: r.pop("ranks"), "'ranks'"),
    "text ranks": (lambda r: r.update(ranks="3"), "ranks: Expected .int."),
    "true chunks": (lambda r: r.update(chunks=True), "chunks: Expected .int."),
    "collective": (
        lambda r: r.update(collective="all_sum"),
        "collective: Invalid enum value .all_sum.",
    ),
    "kind": (
        lambda r: r["operations"][0][0].update(kind="get"),
        r"\[0\][.]kind: Invalid enum value .get.",
    ),
    "span": (lambda r: r["operations"][0][0].update(dst=["in", 0]), r"\[0\][.]dst: Expected"),
    "deps": (lambda r: r["operations"][0][0].update(deps=[1]), r"\[0\][.]deps"),
    "route": (lambda r: r["operations"][0][0].update(route=[1]), r"\[0\][.]route"),
    "operations": (lambda r: r.update(operations=[1]), r"operations\[0\]: Expected .array."),
    "buffer": (lambda r: r.update(buffers=[{"name": "in", "role": "in"}]), "'slots'"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_json_gives_one_sentence(name):
    change, says = BROKEN[name]
    text = "{" if name == "not json" else _broken(change)
    with pytest.raises(ModelError, match=says) as caught:
        from_json(text)
    assert str(caught.value).count("\n") == 0


@settings(max_examples=80, deadline=None)
@given(any_program(), st.integers(0, 40), st.integers(0, 1000))
def test_executor_is_bitwise_the_reference_for_integers(program, length, seed):
    check(program)
    rng = np.random.default_rng(seed)
    inputs = [
        rng.integers(-1000, 1000, length * program.ranks, dtype=np.int32)
        for _ in range(program.ranks)
    ]
    wanted = reference_result(
        program.collective, inputs, program.reduction or "sum", root=program.root
    )
    for order in (None, seed):
        for got, want in zip(execute(program, inputs, seed=order), wanted, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_array_equal(got, want)
                assert got.dtype == np.int32


def test_reference_is_numpy():
    rng = np.random.default_rng(3)
    rows = rng.integers(-9, 9, (4, 8))
    inputs = list(rows)
    np.testing.assert_array_equal(reference_result("all_reduce", inputs)[2], rows.sum(0))
    np.testing.assert_array_equal(reference_result("all_reduce", inputs, "max")[0], rows.max(0))
    np.testing.assert_array_equal(reference_result("all_reduce", inputs, "min")[0], rows.min(0))
    np.testing.assert_array_equal(reference_result("all_gather", inputs)[1], rows.ravel())
    np.testing.assert_array_equal(reference_result("reduce_scatter", inputs)[3], rows.sum(0)[6:])
    swapped = rows.reshape(4, 4, 2).transpose(1, 0, 2).reshape(4, 8)
    np.testing.assert_array_equal(np.array(reference_result("all_to_all", inputs)), swapped)


def test_executor_refuses_inputs_that_do_not_fit():
    program = ring3()
    with pytest.raises(InvalidUsageError, match="3 one-dimensional arrays"):
        execute(program, [np.zeros(3)] * 2)
    with pytest.raises(InvalidUsageError, match="3 one-dimensional arrays"):
        execute(program, [np.zeros(3), np.zeros(3), np.zeros(4)])
    with pytest.raises(InvalidUsageError, match="multiple of 3"):
        execute(classics.build("ring", "reduce_scatter", 3), [np.zeros(4)] * 3)


def test_steps_and_final_writers():
    program = ring3()
    assert max(steps(program).values()) == 4 - (program.operations[0][-1].kind is Kind.PUT)
    writers = final_writers(program)
    assert set(writers) == {(rank, slot) for rank in range(3) for slot in range(3)}
    for (rank, slot), ref in writers.items():
        op = program.op(ref)
        assert op.writes_on(ref.rank) == rank and slot in op.dst.slots()


def _run_xml(text, inputs):
    """Interprets a program in MSCCL XML: the steps of a thread block run in order, with at most one
    message in flight on a connection.
    """
    root = ElementTree.fromstring(text)
    memory, blocks = {}, []
    for gpu in root:
        rank = int(gpu.get("id"))
        cuts = np.split(inputs[rank], int(gpu.get("i_chunks")))
        memory[rank] = {
            "i": cuts,
            "o": [None] * int(gpu.get("o_chunks")),
            "s": [None] * int(gpu.get("s_chunks")),
        }
        for block in gpu:
            assert [int(s.get("s")) for s in block] == list(range(len(block)))
            blocks.append((rank, int(block.get("id")), block, [0]))
    done, wires = set(), {}

    def ready(rank, block, step):
        depid, dep = int(step.get("depid")), int(step.get("deps"))
        if depid >= 0 and (rank, depid, dep) not in done:
            return False
        chan = int(block.get("chan"))
        wire = (
            wires.get((rank, int(block.get("send")), chan)),
            wires.get((int(block.get("recv")), rank, chan)),
        )
        return {"s": wire[0] is None, "r": wire[1] is not None}.get(step.get("type"), True)

    moved = True
    while moved:
        moved = False
        for rank, number, block, at in blocks:
            while at[0] < len(block) and ready(rank, block, block[at[0]]):
                step = block[at[0]]
                src = memory[rank][step.get("srcbuf")]
                dst = memory[rank][step.get("dstbuf")]
                so, do, n = (int(step.get(k)) for k in ("srcoff", "dstoff", "cnt"))
                kind, chan = step.get("type"), int(block.get("chan"))
                if kind == "s":
                    wires[rank, int(block.get("send")), chan] = [x.copy() for x in src[so : so + n]]
                elif kind == "r":
                    dst[do : do + n] = wires.pop((int(block.get("recv")), rank, chan))
                elif kind == "cpy":
                    dst[do : do + n] = [x.copy() for x in src[so : so + n]]
                elif kind == "re":
                    pairs = zip(dst[do : do + n], src[so : so + n], strict=True)
                    dst[do : do + n] = [a + b for a, b in pairs]
                done.add((rank, number, at[0]))
                at[0] += 1
                moved = True
    assert all(at[0] == len(block) for _, _, block, at in blocks), "the XML program deadlocks"
    return [memory[rank]["o"] for rank in sorted(memory)]


@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize("ranks", [2, 4, 5])
def test_xml_runs_to_the_same_result(collective, ranks):
    boxes = boxes_for(ranks)
    for name in classics.supported(collective, ranks, boxes):
        program = classics.build(name, collective, ranks, boxes=boxes)
        rng = np.random.default_rng(7)
        slots = program.buffer_by_name["in"].slots
        inputs = [rng.integers(0, 99, 6 * slots) for _ in range(ranks)]
        wanted = reference_result(collective, inputs, root=program.root)
        for got, want in zip(_run_xml(to_xml(program), inputs), wanted, strict=True):
            if want is not None:
                np.testing.assert_array_equal(np.concatenate(got), want)


def _check_limits(text, steps, blocks, collectives):
    """Asserts that a program keeps the limits of the parsers of MSCCL's runtimes, which are taken
    from their sources.
    """
    root = ElementTree.fromstring(text)
    assert root.tag == "algo" and root.get("coll") in collectives
    for name in ("nchunksperloop", "nchannels", "ngpus", "minBytes", "maxBytes", "inplace"):
        assert int(root.get(name)) >= 0
    assert root.get("proto") == "Simple" and int(root.get("outofplace")) == 1
    assert 1 <= int(root.get("nchannels")) <= 32
    for gpu in root:
        slots = {k: int(gpu.get(f"{k}_chunks")) for k in "ios"}
        assert [int(block.get("id")) for block in gpu] == list(range(len(gpu)))
        assert len(gpu) <= blocks
        ends = [
            (b.get("send"), b.get("recv"), b.get("chan"))
            for b in gpu
            if b.get("send") != b.get("recv")
        ]
        assert len(set(ends)) == len(ends)
        for block in gpu:
            assert 0 <= int(block.get("chan")) < int(root.get("nchannels"))
            assert len(block) <= steps
            for step in block:
                if step.get("type") == "nop":
                    assert int(step.get("depid")) >= 0
                    continue
                count = int(step.get("cnt"))
                assert 0 < count < 72
                sides = {"s": ("src",), "r": ("dst",)}.get(step.get("type"), ("src", "dst"))
                for side in sides:
                    offset = int(step.get(f"{side}off"))
                    assert 0 <= offset <= slots[step.get(f"{side}buf")] - count
                assert -1 <= int(step.get("depid")) <= 127
                if int(step.get("depid")) >= 0:
                    other = gpu[int(step.get("depid"))][int(step.get("deps"))]
                    assert other.get("hasdep") == "1"


BUILT = ["ring8", "a100x2", "h100x2", "mi300x", "dgx1v", "mi250", "mesh4x4"]
LIMITS = {"rccl": (64, 1024, "reducescatter"), "msccl": (256, 216, "reduce_scatter")}


@functools.cache
def synthesized(name, collective):
    return synthesize(named(name), collective)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BUILT)
def test_xml_of_synthesised_programs_fits_its_runtime_and_is_right(name, target):
    topology = named(name)
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        program = synthesized(name, collective)
        steps, blocks, scatter = LIMITS[target]
        text = to_xml(program, target)
        _check_limits(text, steps, blocks, {"allgather", "allreduce", scatter})
        rng = np.random.default_rng(7)
        slots = program.buffer_by_name["in"].slots
        inputs = [rng.integers(0, 99, slots) for _ in topology.ranks]
        wanted = reference_result(collective, inputs)
        for got, want in zip(_run_xml(text, inputs), wanted, strict=True):
            np.testing.assert_array_equal(np.concatenate(got), want)


def test_xml_refuses_programs_beyond_runtime_limits():
    with pytest.raises(UnsupportedError, match="thread blocks on one channel; rccl allows 32"):
        to_xml(classics.build("one_shot", "all_to_all", 34))
    with pytest.raises(InvalidUsageError, match="choose one of msccl, rccl"):
        to_xml(ring3(), "nccl")


def test_xml_refuses_inexpressible_programs():
    with pytest.raises(UnsupportedError, match="dot products"):
        to_xml(classics.build("adasum_halving", "all_reduce", 4, reduction="adasum"))
    with pytest.raises(UnsupportedError, match="pieces"):
        to_xml(dataclasses.replace(ring3(), pieces=2))
    b = ProgramBuilder("chain", "broadcast", 3, 1, root=0)
    b.copy(0, Span(IN, 0), Span(OUT, 0))
    far = b.put(0, 1, Span(OUT, 0), Span(OUT, 0))
    b.put(0, 2, Span(OUT, 0), Span(OUT, 0))
    b._add(2, Kind.COPY, Span(OUT, 0), (Span(OUT, 0),), after=[far])
    with pytest.raises(UnsupportedError, match="no signals without data"):
        to_xml(b.build())


@pytest.mark.parametrize("collective", ["all_gather", "all_reduce", "all_to_all"])
def test_uncut_spans_become_one_slot(collective):
    program = classics.build("one_shot", collective, 4, parts=6)
    whole = coarsened(program)
    assert whole == dataclasses.replace(
        classics.build("one_shot", collective, 4), name=program.name
    )
    assert all(op.dst.count in (1, 4) for ops in whole.operations for op in ops)
    assert len(flow(whole).values) * 6 == len(flow(program).values)
    ring = classics.build("bidirectional_ring", "all_gather", 4)
    assert coarsened(ring) is ring  # it sends one half in each direction
