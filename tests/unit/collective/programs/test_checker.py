"""The checker of collective programs refuses every kind of fault with an error that names it;
programs that it accepts run correctly.
"""

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ark.collective import classics
from ark.collective.programs import (
    Buffer,
    Kind,
    OpRef,
    Role,
    Span,
    check,
    execute,
    reference_result,
)
from ark.errors import BaseError, PlanError
from tests.cases.collective_programs import any_program


def with_ops(program, change):
    """Returns the program after `change` has edited its lists of operations."""
    ops = [list(row) for row in program.operations]
    change(ops)
    return dataclasses.replace(program, operations=tuple(tuple(row) for row in ops))


def edit(rank, position, **fields):
    def change(ops):
        ops[rank][position] = dataclasses.replace(ops[rank][position], **fields)

    return change


def ring():
    return classics.build("ring", "all_reduce", 3)


def place(program, kind, nth=0):
    """Returns the index, in rank 0's list of operations, of the nth operation of a kind."""
    actual = [i for i, op in enumerate(program.operations[0]) if op.kind is kind]
    return actual[nth]


def test_report_counts():
    report = check(ring())
    assert (report.puts, report.reduces, report.steps) == (12, 6, 4)


def refuse(program, says):
    with pytest.raises(PlanError, match=says) as caught:
        check(program)
    assert "\n" not in str(caught.value)


def test_refuses_a_race():
    program = ring()
    for position, op in enumerate(program.operations[0]):
        if op.deps:
            refuse(with_ops(program, edit(0, position, deps=())), "no chain of dependencies")


def test_refuses_a_deadlock():
    program = ring()
    last = len(program.operations[0]) - 1

    def change(ops):
        ops[0][0] = dataclasses.replace(ops[0][0], deps=(OpRef(1, last),))
        ops[1][0] = dataclasses.replace(ops[1][0], deps=(OpRef(0, last),))

    refuse(with_ops(program, change), "deadlocks.*rank 0 operation 0.*waits for rank 1")
    refuse(with_ops(program, edit(0, 1, deps=(OpRef(0, 1),))), "deadlocks")
    # Operation 0 would wait for a later operation of its own list, which runs in order.
    refuse(with_ops(program, edit(0, 0, deps=(OpRef(0, 1),))), "deadlocks")


def test_out_of_range_operands_are_refused():
    program = ring()
    put = place(program, Kind.PUT)
    for fields, says in (
        ({"dst": Span("scratch", 3)}, "exceeds the buffer scratch"),
        ({"dst": Span("scratch", -1)}, "exceeds the buffer scratch"),
        ({"dst": Span("scratch", 0, 0)}, "exceeds the buffer scratch"),
        ({"srcs": (Span("in", 2, 2),)}, "exceeds the buffer in"),
        ({"dst": Span("nowhere", 0)}, "does not exist"),
        ({"peer": 3}, "peer must be another"),
        ({"peer": 0}, "peer must be another"),
        ({"peer": None}, "must have a peer"),
        ({"deps": (OpRef(7, 0),)}, "does not exist"),
        ({"deps": (OpRef(1, 99),)}, "does not exist"),
        ({"srcs": (Span("in", 0, 2),)}, "number, length and kind"),
        ({"divide": 2}, "divides"),
        ({"reduce": "sum"}, "does not fit its kind"),
    ):
        refuse(with_ops(program, edit(0, put, **fields)), says)
    reduce = place(program, Kind.REDUCE)
    for fields, says in (
        ({"reduce": "median"}, "does not fit its kind"),
        ({"reduce": "max"}, "does not compute sum"),
        ({"divide": 0}, "divides"),
        ({"divide": 3}, "combines a value that was already divided|must hold|divided"),
        ({"srcs": (Span("in", 0),)}, "number, length and kind"),
        ({"route": ("g0", "g1")}, "only puts have one"),
    ):
        refuse(with_ops(program, edit(0, reduce, **fields)), says)


def test_refuses_headers_that_contradict():
    program = ring()
    buffers = program.buffers
    for fields, says in (
        ({"ranks": 4}, "has 3 lists"),
        ({"pieces": 0}, "at least 1"),
        ({"root": 0}, "cannot have the root"),
        ({"reduction": "median"}, "does not exist"),
        ({"buffers": buffers[:1]}, "no buffer out|does not exist"),
        ({"buffers": (*buffers, buffers[2])}, "same name"),
        ({"buffers": (Buffer("in", Role.IN, 9), *buffers[1:])}, "9 slots; all_reduce needs"),
        ({"buffers": (Buffer("in", Role.SCRATCH, 3), *buffers[1:])}, "has the role scratch"),
        ({"buffers": (*buffers, Buffer("huge", Role.SCRATCH, 10**12))}, "slots together"),
        ({"reduction": "adasum"}, "Adasum needs a power of two"),
    ):
        refuse(dataclasses.replace(program, **fields), says)
    scatter = classics.build("ring", "reduce_scatter", 3)
    refuse(dataclasses.replace(scatter, chunks=4), "multiple of 3")


def test_refuses_a_contribution_reduced_twice_or_never():
    program = classics.build("one_shot", "all_reduce", 3)
    reduce = place(program, Kind.REDUCE)
    srcs = program.operations[0][reduce].srcs
    twice = (srcs[0], srcs[1], srcs[1])
    refuse(with_ops(program, edit(0, reduce, srcs=twice)), "reduces rank 1's part .* twice")
    refuse(with_ops(program, edit(0, reduce, srcs=srcs[:2])), "must hold .* ranks 0, 1, 2")


def test_refuses_a_wrong_end_and_a_read_of_nothing():
    program = classics.build("ring", "all_gather", 3)
    refuse(with_ops(program, edit(0, 0, dst=Span("out", 1))), "nothing has arrived|must hold|touch")
    gather = classics.build("one_shot", "all_gather", 3)
    put = place(gather, Kind.PUT)
    dropped = with_ops(gather, lambda ops: ops[0].pop(put))
    refuse(dropped, "rank 1 must hold chunk 0 of rank 0 in out\\[0\\], but holds nothing")
    early = with_ops(gather, edit(0, put, srcs=(Span("out", 2),), deps=()))
    refuse(early, "where nothing has arrived|no chain")


def test_refuses_combining_different_chunks():
    program = classics.build("one_shot", "all_reduce", 2, parts=2)
    reduce = place(program, Kind.REDUCE)
    op = program.operations[0][reduce]
    crossed = (op.srcs[0], Span("scratch", 3))
    change = edit(0, reduce, srcs=(Span("in", 0), crossed[1]), dst=Span("out", 0))
    refuse(with_ops(program, change), "combines chunk 0 with chunk 1")


def test_whole_tensor_reductions_need_all_dot_products():
    program = classics.build("adasum_halving", "all_reduce", 4)
    check(program)
    refuse(dataclasses.replace(program, pieces=2), "whole tensors")
    dots = [i for i, op in enumerate(program.operations[0]) if op.srcs[0].buffer == "dots"]
    add = next(i for i in dots if program.operations[0][i].kind is Kind.REDUCE)
    op = program.operations[0][add]
    refuse(with_ops(program, edit(0, add, srcs=(op.srcs[0], op.srcs[0]))), "of a chunk twice")
    blend = place(program, Kind.BLEND)
    first, second, total = program.operations[0][blend].srcs
    assert program.operations[0][add].dst == total
    partial = (first, second, op.srcs[0])
    refuse(with_ops(program, edit(0, blend, srcs=partial)), "do not cover the whole tensor")
    tree = classics.build("adasum_tree", "all_reduce", 4)
    swap = place(tree, Kind.REDUCE)
    srcs = tree.operations[0][swap].srcs
    refuse(with_ops(tree, edit(0, swap, srcs=srcs[::-1])), "must hold")


@settings(max_examples=150, deadline=None)
@given(any_program(most_ranks=5), st.integers(0, 10**6))
def test_damaged_programs_are_refused_or_correct(program, seed):
    """A damaged program is refused, or gives the right result in every order that is tried."""
    rng = random.Random(seed)

    def damage(ops):
        rank = rng.choice([r for r, row in enumerate(ops) if row])
        at = rng.randrange(len(ops[rank]))
        op = ops[rank][at]
        form = rng.randrange(5)
        if form == 0 and op.deps:
            op = dataclasses.replace(op, deps=op.deps[1:])
        elif form == 1:
            shift = rng.choice([-1, 1])
            op = dataclasses.replace(
                op, dst=dataclasses.replace(op.dst, start=op.dst.start + shift)
            )
        elif form == 2:
            other = rng.randrange(len(ops[rank]))
            ops[rank][at], ops[rank][other] = ops[rank][other], op
            return
        elif form == 3:
            op = dataclasses.replace(op, srcs=(op.srcs[-1], *op.srcs[1:]))
        else:
            op = dataclasses.replace(op, deps=(*op.deps, OpRef(rng.randrange(len(ops)), 0)))
        ops[rank][at] = op

    damaged = with_ops(program, damage)
    try:
        check(damaged)
    except BaseError as error:
        assert "\n" not in str(error)
        return
    numbers = np.random.default_rng(seed)
    inputs = [numbers.integers(-99, 99, 6 * program.ranks) for _ in range(program.ranks)]
    wanted = reference_result(
        program.collective, inputs, program.reduction or "sum", root=program.root
    )
    for order in range(4):
        for got, want in zip(execute(damaged, inputs, seed=order), wanted, strict=True):
            if want is not None:
                np.testing.assert_array_equal(got, want)
