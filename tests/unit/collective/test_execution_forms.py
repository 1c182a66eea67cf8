"""MSCCL++ execution plans with packets, slices, switch channels and reductions, in place or not:
each gives NumPy's result, and unsupported features are refused with an error that names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ark.collective.programs import execute, from_execution_plan, to_execution_plan
from ark.errors import ModelError, PlanError, UnsupportedError
from tests.cases import execution_plans as plans

CHUNK_ELEMENTS = 6  # elements of a chunk


def gathered(inputs: list[np.ndarray], rank: int) -> np.ndarray:
    return np.concatenate(inputs)


def exchanged(inputs: list[np.ndarray], rank: int) -> np.ndarray:
    return np.concatenate([np.split(x, len(inputs))[rank] for x in inputs])


def total(function: Any) -> Callable[[list[np.ndarray], int], np.ndarray]:
    return lambda inputs, rank: function(np.stack(inputs), axis=0)


FORMS: dict[str, tuple[Callable[[int], str], Callable[[list[np.ndarray], int], np.ndarray]]] = {
    "packets": (plans.reduced_by_packets, total(np.sum)),
    "packets of the largest": (lambda n: plans.reduced_by_packets(n, "max"), total(np.max)),
    "packets that are read and sent on": (plans.copied_and_reduced_by_packets, total(np.sum)),
    "gathered packets": (plans.gathered_by_packets, gathered),
    "slices": (plans.gathered_in_slices, gathered),
    "a switch": (plans.reduced_by_the_switch, total(np.sum)),
    "a switch of the least": (lambda n: plans.reduced_by_the_switch(n, "min"), total(np.min)),
    "load and store": (plans.loaded_then_stored, total(np.sum)),
    "an exchange in place": (plans.exchanged_in_place, exchanged),
    "sent to the next": (plans.shifted, lambda inputs, rank: inputs[rank - 1]),
}


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("form", FORMS)
def test_plans_give_numpys_result(form: str, world: int) -> None:
    text, want = FORMS[form][0](world), FORMS[form][1]
    program = from_execution_plan(text)
    size = CHUNK_ELEMENTS if want is gathered else CHUNK_ELEMENTS * world
    random = np.random.default_rng(world)
    inputs = [random.integers(-99, 99, size) for _ in range(world)]
    for seed in range(3):
        for rank, result in enumerate(execute(program, inputs, seed=seed)):
            np.testing.assert_array_equal(result, want(inputs, rank))


def changed(text: str, which: str, **fields: Any) -> str:
    """Returns the plan with other fields in GPU 0's first operation of that name."""
    plan = json.loads(text)
    ops = [op for block in plan["gpus"][0]["threadblocks"] for op in block["ops"]]
    next(op for op in ops if op["name"] == which).update(fields)
    return json.dumps(plan)


def test_unsupported_plans_name_the_reason() -> None:
    packets, slices = plans.reduced_by_packets(2), plans.gathered_in_slices(2)
    exchange = plans.exchanged_in_place(2)
    for text, says in (
        (exchange.replace('"alltoall"', '"test"'), "the plan's collective is 'test'"),
        (exchange.replace('"alltoall"', '"sendrecv"'), "receive chunks of ranks .*0, 1"),
        (changed(plans.shifted(3), "put", src_buff=[plans.local("i", 0, 2)],
                 dst_buff=[plans.remote(0, 0, 2)]), "'sendrecv', but .* ranks .*-1, 0"),
        (changed(packets, "respkt", reduce_op="max"), "reduce by max and sum"),
        (changed(packets, "ppkt", name="put"), "packets or data that are never sent"),
        (changed(slices, "put", tbg_info={"tb_id": 2, "tbg_size": 2}), "block 2 is out of range"),
        (changed(slices, "put", tbg_info={"tb_id": 0, "tbg_size": 67}), "cut into 134 parts"),
        (changed(plans.reduced_by_the_switch(2), "glres",
                 src_buff=[{"switch_channel_id": 4, "index": 0, "size": 1}]),
         "names switch channel 4"),
    ):  # fmt: skip
        with pytest.raises((ModelError, UnsupportedError), match=says):
            from_execution_plan(text)


def test_share_that_no_block_moves_is_missed() -> None:
    """A plan in which no thread block sends one half of a rank's data to the peers is refused."""
    text = changed(plans.gathered_in_slices(2), "put", tbg_info={"tb_id": 1, "tbg_size": 2})
    with pytest.raises(PlanError):
        from_execution_plan(text)


def test_exchange_of_whole_inputs_is_written_as_one() -> None:
    program = from_execution_plan(plans.shifted(5, by=2))
    assert program.counts is not None and program.permutes
    assert [row.index(3) for row in program.counts] == [2, 3, 4, 0, 1]
    written = to_execution_plan(program)
    assert json.loads(written)["collective"] == "sendrecv"
    assert from_execution_plan(written).counts == program.counts


def test_older_name_of_a_switch_channels_buffer_is_read() -> None:
    text = plans.reduced_by_the_switch(2)
    older = text.replace('"buffer_type"', '"buff"')
    assert older != text and from_execution_plan(older) == from_execution_plan(text)
