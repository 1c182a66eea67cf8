"""Reading MSCCL XML: files that ark writes, files written by hand, and invalid files."""

from __future__ import annotations

import numpy as np
import pytest

import ark
from ark.collective import topology
from ark.collective.programs import CollectiveProgram, check, execute, from_xml, to_xml
from ark.collective.programs.types import io_slots
from ark.collective.synthesis import synthesize
from ark.errors import ModelError, PlanError
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan
from ark.plan.verify import verify
from tests.cases.msccl_read import ROUNDS
from tests.unit.plan.shapes import machine


def results(program: CollectiveProgram) -> list[np.ndarray]:
    slots, _ = io_slots(program.collective, program.ranks, program.chunks)
    data = np.random.default_rng(1)
    return execute(program, [data.integers(-99, 99, slots * 3) for _ in range(program.ranks)])


@pytest.mark.parametrize(("world", "collective", "algorithm"), ROUNDS)
def test_written_programs_are_read_with_equal_results(
    world: int, collective: str, algorithm: str
) -> None:
    program = synthesize(topology.full_mesh(world), collective, algorithm)
    if program.pieces != 1:
        program = synthesize(topology.full_mesh(world), collective, algorithm, pieces=1)
    read = from_xml(to_xml(program))
    check(read)
    ranks = [program.root] if collective == "reduce" else range(world)
    for rank in ranks:
        np.testing.assert_array_equal(results(read)[rank], results(program)[rank])


def ring(world: int, attributes: str = 'inplace="1" outofplace="0"') -> str:
    """Returns a ring all-reduce as MSCCL's own tools write it: in place, one thread block for each
    rank, and every rank sends before it receives.
    """
    lines = [
        f'<algo name="ring" nchunksperloop="{world}" nchannels="1" proto="Simple" '
        f'ngpus="{world}" coll="allreduce" {attributes}>'
    ]
    for r in range(world):
        lines.append(f'<gpu id="{r}" i_chunks="{world}" o_chunks="0" s_chunks="0">')
        after, before = (r + 1) % world, (r - 1) % world
        lines.append(f'<tb id="0" send="{after}" recv="{before}" chan="0">')
        kinds = ["s"] + ["rrs"] * (world - 2) + ["rrcs"] + ["rcs"] * (world - 2) + ["r"]
        for number, kind in enumerate(kinds):
            at = (r - number) % world
            lines.append(
                f'<step s="{number}" type="{kind}" srcbuf="i" srcoff="{at}" dstbuf="i" '
                f'dstoff="{at}" cnt="1" depid="-1" deps="-1" hasdep="0"/>'
            )
        lines.append("</tb></gpu>")
    return "\n".join([*lines, "</algo>"])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_ring_in_place_adds_everything(world: int) -> None:
    inputs = [np.arange(world * 2) + 100 * r for r in range(world)]
    for program in execute(from_xml(ring(world)), inputs):
        np.testing.assert_array_equal(program, sum(inputs))
    largest = execute(from_xml(ring(world), reduction="max"), inputs)
    np.testing.assert_array_equal(largest[0], inputs[-1])


def test_it_runs_as_tasks_of_a_plan() -> None:
    program = from_xml(ring(3))
    plans = []
    for rank in range(3):
        model = Model(rank, 3)
        with use_model(model):
            x = ark.mul(ark.tensor([600]), 2.0)
            ark.copy(ark.all_reduce(x, rank, 3, algorithm=program), ark.tensor([600]))
        plans.append(plan(model.graph, machine(2)))
    verify(plans)


BAD = {
    "no XML": ("<algo", "not valid XML"),
    "entities": ('<!DOCTYPE a [<!ENTITY x "y">]>' + ring(2), "entities"),
    "another element": ("<gpu/>", "expected <algo>"),
    "no such collective": (ring(2).replace("allreduce", "alldance"), "alldance"),
    "a rank too few": (ring(2).replace('ngpus="2"', 'ngpus="3"'), "2 <gpu> elements"),
    "a number that is none": (ring(2).replace('chan="0"', 'chan="zero"'), "chan='zero'"),
    "a number without end": (ring(2).replace('cnt="1"', f'cnt="{"9" * 5000}"'), "cnt="),
    "no such step": (ring(2).replace('type="s"', 'type="jump"'), "jump"),
    "a receive without a send": (ring(2).replace('type="s"', 'type="nop"'), "never ends"),
    "waits for itself": (ring(2).replace('depid="-1" deps="-1"', 'depid="0" deps="0"'), "never"),
    "waits for nobody": (ring(2).replace('depid="-1"', 'depid="7"'), "block 7, which does not"),
    "lengths differ": (ring(2).replace('type="s" srcbuf="i" srcoff="0" dstbuf="i" dstoff="0" '
                                       'cnt="1"', 'type="s" srcbuf="i" srcoff="0" dstbuf="i" '
                                       'dstoff="0" cnt="2"'), "were sent"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_invalid_programs_are_refused(case: str) -> None:
    text, match = BAD[case]
    with pytest.raises(ModelError, match=match):
        from_xml(text)


def test_programs_that_miss_their_collective_are_refused() -> None:
    with pytest.raises(PlanError):
        from_xml(ring(2).replace('type="rrcs"', 'type="rcs"'))
