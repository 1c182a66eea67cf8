"""Products fused with the collective next to them: the bits equal those of two separate ops, on all
ranks and in every iteration, and NumPy's numbers. The verifier refuses plans in which a signal is
missing.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from functools import reduce

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.cli.measure.comm_overlap import _graph, overlap_case
from ark.ir.dtype import fp32
from ark.lower.engines import DMA
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.machine.variant import MOVE, Role
from ark.plan.types import Plan, Task
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.cases.collectives import build, devices, keep
from tests.ranks import ThreadRanks, run_ranks
from tests.slow import slow
from tests.unit.plan.shapes import machine, replace_task

LAUNCH_ITERATIONS = 3
ROUNDS = "rounds"  # in which a GPU multiplies it
SHAPES = {
    # Each product by name: (rows, columns, k, type, and for each operand True if it is
    # transposed).
    "ragged": (203, 133, 24, ark.fp32, False, True),
    "half": (192, 96, 40, ark.fp16, True, False),
    "bfloat": (264, 160, 32, ark.bf16, False, False),
    "few rows": (9, 64, 16, ark.fp32, False, True),
}
LARGE = {ROUNDS: (4096, 4096, 64, ark.bf16, False, True)}
Body = Callable[[int], object]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets all-reduces of any size be fused with products. Without it small all-reduces would be
    sent as packets.
    """
    monkeypatch.setattr("ark.lower.rewrite.overlap_collectives.in_packets", lambda *_: False)


def rounded(world: int, rows: int) -> int:
    return -(-rows // world) * world


def body(world: int, shape_name: str, symmetric: bool = False) -> Body:
    """Returns a rank's model. Both matrices hold small integers, one grows with the iteration, and
    the addends of a sum differ between ranks.
    """
    rows, columns, depth, dtype, turn_a, turn_b = (SHAPES | LARGE)[shape_name]
    place = {"world_size": world}

    def make(rank: int) -> None:
        def operand(name: str, shape: list[int], transposed: bool) -> ark.Tensor:
            shape = shape[::-1] if transposed else shape
            x = ark.tensor(shape, ark.fp32, name=name)
            return ark.cast(ark.add(x, 1.0, output=x) if name == "a" else x, dtype)

        b = operand("b", [depth, columns], turn_b)
        transposes = {"transpose_input": turn_a, "transpose_other": turn_b}
        a = operand("a", [rows, depth], turn_a)
        residual = ark.cast(ark.tensor([rows, columns], name="added"), dtype)
        result = ark.all_reduce(ark.matmul(a, b, **transposes), rank, **place)
        keep(ark.cast(result, ark.fp32), "sum")
        direct = ark.all_reduce(ark.matmul(a, b, **transposes), rank, **place)
        keep(ark.cast(ark.add(direct, residual), ark.fp32), "residual")
        out = ark.tensor([rows, columns], dtype, name="kept")
        ark.all_reduce(ark.matmul(a, b, **transposes), rank, **place, output=out)
        keep(ark.cast(out, ark.fp32), "given")
        even = operand("even", [rounded(world, rows), depth], turn_a)
        share = ark.reduce_scatter(ark.matmul(even, b, **transposes), rank, **place)
        keep(ark.cast(share, ark.fp32), "share")
        c = operand("c", [rows, depth], False)
        gathered = ark.all_gather(c, rank, **place)
        product = ark.matmul(gathered, b, transpose_other=turn_b)
        keep(ark.cast(product, ark.fp32), "gather")

    return make


def inputs(world: int, shape_name: str) -> list[dict[str, np.ndarray]]:
    rows, columns, depth, _, turn_a, turn_b = (SHAPES | LARGE)[shape_name]
    results = []
    for rank in range(world):
        rng = np.random.default_rng(rank)

        def whole(m: int, n: int, transposed: bool, rng: np.random.Generator = rng) -> np.ndarray:
            return rng.integers(-1, 2, (n, m) if transposed else (m, n)).astype(np.float32)

        results.append(
            {
                "a": whole(rows, depth, turn_a),
                "b": whole(depth, columns, turn_b),
                "even": whole(rounded(world, rows), depth, turn_a),
                "c": whole(rows, depth, False),
                "added": whole(rows, columns, False),
            }
        )
    return results


def expected(world: int, shape_name: str, rank: int) -> dict[str, np.ndarray]:
    *_, turn_a, turn_b = (SHAPES | LARGE)[shape_name]
    given = inputs(world, shape_name)
    right = [x["b"].T if turn_b else x["b"] for x in given]
    left = [(x["a"].T if turn_a else x["a"]) + LAUNCH_ITERATIONS for x in given]
    even = [x["even"].T if turn_a else x["even"] for x in given]
    total = reduce(operator.add, (a @ b for a, b in zip(left, right, strict=True)))
    shares = reduce(operator.add, (a @ b for a, b in zip(even, right, strict=True)))
    part = len(shares) // world
    return {
        "sum": total,
        "residual": total + given[rank]["added"],
        "given": total,
        "share": shares[rank * part : (rank + 1) * part],
        "gather": np.concatenate([x["c"] for x in given]) @ right[rank],
    }


def moving(target: Machine) -> Machine:
    """Returns the machine with warps that move data while others multiply, and with small tiles, so
    that products take several rounds.
    """
    first = target.variants[0]
    with_lists = dataclasses.replace(first, roles=(*first.roles, Role(MOVE, 1)))
    return dataclasses.replace(target, variants=(first, with_lists), tile=(32, 64))


def sparing(target: Machine) -> Machine:
    """Returns the machine with 17 processors. Two of them have no tile of a product of 45 tiles."""
    return dataclasses.replace(target, processors=17, tile=(32, 64))


def putting(plan: Plan) -> set[int]:
    """Returns the processors that copy results of products to peers."""
    puts = {op.id for op in plan.ops if op.kind == "combine" and "_reduce.0.put+" in op.name}
    lists = plan.phases[0].processors
    return {number for number, tasks in enumerate(lists) if any(t.op in puts for t in tasks)}


def moved(plan: Plan) -> list[Task]:
    """Returns the tasks in the lists of the moving warps (those that copy data while others
    multiply), which follow those of the processors.
    """
    return [t for listed in plan.phases[0].processors[plan.processors :] for t in listed]


def results(
    name: str,
    world: int,
    shape_name: str,
    moves: bool = False,
    spares: bool = False,
    **options: object,
) -> list[dict[str, np.ndarray]]:
    """Runs a fused product and collective for some iterations. Returns each rank's results by name.
    moves: plan for machines with moving warps. spares: plan for processors of which two have no
    tiles.
    """
    with devices(name, world) as (opened, target):
        target = moving(target) if moves and name == "cpu" else target
        target = sparing(target) if spares else target
        plans = build(world, body(world, shape_name), target, **{"overlap": True, **options})
        verify(plans)
        assert any(moved(plan) for plan in plans) == moves
        assert not spares or all(putting(plan) == {15, 16} for plan in plans)
        given = inputs(world, shape_name)

        def run(ranks: ThreadRanks) -> dict[str, np.ndarray]:
            device = opened[ranks.rank]
            backend = ark.backend.registry.get(name)
            with Executor(plans[ranks.rank], backend, device, ranks=ranks) as executor:
                buffers = {b.name.rpartition(".")[0]: b for b in executor.plan.buffers}
                own = {n: b for n, b in buffers.items() if b.rank == ranks.rank}
                for label, values in given[ranks.rank].items():
                    device.write(executor.buffer_address(own[label].id), values.view(np.uint8))
                executor.start(LAUNCH_ITERATIONS).wait(60.0)
                return {
                    label: device.read(
                        executor.buffer_address(own[label].id), own[label].nbytes
                    ).view(np.float32)
                    for label in expected(world, shape_name, 0)
                }

        return run_ranks(world, run)


def names(plans: list[Plan]) -> set[str]:
    return {op.name for op in plans[0].ops}


def check(name: str, world: int, shape_name: str, **options: object) -> None:
    """Asserts that a fused product and collective gives the results of separate ops and of NumPy.
    In fp32 the inputs are few integers, whose sums are exact.
    """
    fused = results(name, world, shape_name, **options)
    wanted = [expected(world, shape_name, rank) for rank in range(world)]
    exact = (SHAPES | LARGE)[shape_name][3] is ark.fp32
    apart = wanted if exact else results(name, world, shape_name, overlap=False)
    for rank in range(world):
        for label, values in wanted[rank].items():
            got = fused[rank][label]
            bits = apart[rank][label].reshape(-1)
            np.testing.assert_array_equal(got, bits, err_msg=f"{label} {rank}")
            np.testing.assert_allclose(got, values.reshape(-1), rtol=2e-2, atol=1.0)
    for label in ("sum", "given"):
        for rank in range(1, world):
            np.testing.assert_array_equal(fused[0][label], fused[rank][label])


@pytest.mark.parametrize(
    "shape_name",
    [pytest.param(w, marks=[slow] * (w in ("half", "bfloat"))) for w in sorted(SHAPES)],
)
def test_on_cpu_ranks(shape_name: str) -> None:
    check("cpu", 3 if shape_name == "ragged" else 2, shape_name)


@pytest.mark.parametrize(
    "shape_name", ["half", *(pytest.param(w, marks=slow) for w in ("bfloat", "ragged"))]
)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=slow), pytest.param(4, marks=slow)])
def test_task_lists_of_moving_warps_give_equal_results(shape_name: str, world: int) -> None:
    """Plans with task lists of moving warps give equal results on a CPU, where additional
    processors run these lists.
    """
    check("cpu", world, shape_name, moves=True)


def test_processors_without_tiles_send_and_add() -> None:
    check("cpu", 2, "bfloat", spares=True)


@slow
@pytest.mark.parametrize("shape_name", ["ragged", "half"])
def test_on_eight_cpu_ranks(shape_name: str) -> None:
    check("cpu", 8, shape_name)


def test_one_rank_has_nothing_to_overlap() -> None:
    assert not any("sum" in name for name in names(build(1, body(1, "ragged"))))


def test_ranks_that_begin_together() -> None:
    check("cpu", 2, "bfloat", lockstep=True)


@pytest.mark.parametrize(
    "shape_name", ["few rows", *(pytest.param(w, marks=slow) for w in ("bfloat", "ragged"))]
)
def test_on_emulated_amd(shape_name: str) -> None:
    check("rocm", 2, shape_name)


@pytest.mark.parametrize("options", [{}, {"overlap": DMA}], ids=["stores", "copies"])
def test_on_cuda(options: dict[str, object]) -> None:
    check("cuda", 2, "bfloat", **options)


def test_on_cuda_in_rounds() -> None:
    check("cuda", 2, ROUNDS, moves=True)


def test_on_cuda_moving_warps_stop_after_their_budget() -> None:
    with devices("cuda", 2) as (opened, target):
        plans = build(2, body(2, ROUNDS), target, overlap=True)
        lists = plans[0].phases[0].processors
        far = {c.id for c in plans[0].counters if c.system}
        place = next(
            (0, processor, i)
            for processor in range(plans[0].processors, len(lists))
            for i, task in enumerate(lists[processor])
            if any(c in far for c, _ in task.waits)
        )
        waits = tuple((c, n + (c in far)) for c, n in lists[place[1]][place[2]].waits)
        plans[0] = replace_task(plans[0], place, waits=waits)

        def run(ranks: ThreadRanks) -> str:
            backend, device = ark.backend.registry.get("cuda"), opened[ranks.rank]
            plan = plans[ranks.rank]
            with (
                Executor(plan, backend, device, ranks=ranks, budget_s=0.5) as executor,
                pytest.raises(ark.GpuError) as failed,
            ):
                executor.start(1).wait(30.0)
            return str(failed.value)

        assert "processor" in run_ranks(2, run)[0]


def overlapped(target: object, **options: object) -> list[Plan]:
    return build(2, body(2, "ragged"), target, overlap=True, **options)  # type: ignore[arg-type]


def test_processors_that_multiply_nothing_add_and_send() -> None:
    """16 tiles of a product take 3 rounds on 7 processors, of which one has no tile. That processor
    adds and sends.
    """
    plans = overlapped(machine(7, warps=4))
    plan = plans[0]
    adders = {
        processor
        for processor, tasks in enumerate(plan.phases[0].processors)
        if any(plan.ops[t.op].name == "matmul.all_reduce.0.sum" for t in tasks)
    }
    multiply = {
        processor
        for processor, tasks in enumerate(plan.phases[0].processors)
        if any(plan.ops[t.op].name.startswith("matmul.all_reduce.0.put") for t in tasks)
    }
    assert 6 in adders and 6 not in multiply


def test_products_keep_their_tiles_beside_a_collective() -> None:
    """Products in fp32 that overlap with a collective have the tile sizes of fp32 products
    (Machine.exact_tiles).
    """
    target = dataclasses.replace(registry.machine("h200"), processors=8)
    case = overlap_case("all_reduce", "1024x1024x512", fp32, "auto", 1, 2)
    tiles = [
        {
            tuple(op.params["tile"])
            for op in make_plan(
                _graph(case, 0, 2, True, summed), target, {"lockstep": True, "overlap": True}
            ).ops
            if op.kind == "matmul"
        }
        for summed in (False, True)
    ]
    assert tiles[0] == tiles[1] and tiles[0] <= {tuple(t[:2]) for t in target.exact_tiles}


def test_fp32_products_of_a_gpu_leave_transfers_to_processors_without_tiles() -> None:
    """1,024 tiles on 132 processors are 8 rounds of 128. The other 4 processors put the tiles and
    add 10 of 16 rows of tiles; all processors add the others.
    """
    case = overlap_case("all_reduce", "4096x4096x8192", fp32, "auto", 1, 2)
    graph = _graph(case, 0, 2, True, True)
    plan = make_plan(graph, registry.machine("h200"), {"lockstep": True, "overlap": True})
    idle = {128, 129, 130, 131}
    assert putting(plan) == idle
    own = [t for p in idle for t in plan.phases[0].processors[p]]
    early = {op.id for op in plan.ops if op.name.endswith(".sum.early")}
    assert sum(t.op in early for t in own) == 10 * 32
    products = [op for op in plan.ops if op.kind == "matmul"]
    written = {plan.buffers[plan.tensors[op.operands[-1]].buffer].rank for op in products}
    assert written == {0}


def damaged(plan: Plan) -> Iterator[Plan]:
    """Yields plans in which one signal to a peer or one wait for a peer of an overlapped op is
    dropped.
    """
    seen: set[tuple[int, bool]] = set()
    far = {c.id for c in plan.counters if c.rank != plan.rank}
    awaited = {c.id for c in plan.counters if c.system and c.rank == plan.rank}
    for processor, tasks in enumerate(plan.phases[0].processors):
        for place, task in enumerate(tasks):
            if not ("bands" in plan.ops[task.op].name or "matmul" in plan.ops[task.op].name):
                continue
            signals = tuple(s for s in task.signals if s not in far)
            waits = tuple(w for w in task.waits if w[0] not in awaited or w[1] == 0)
            for kept, changed in (
                (signals == task.signals, {"signals": signals}),
                (waits == task.waits, {"waits": waits}),
            ):
                key = (task.op, "waits" in changed)
                if not kept and key not in seen:
                    seen.add(key)
                    yield replace_task(plan, (0, processor, place), **changed)


@pytest.mark.parametrize(
    "target", [pytest.param(machine(3, warps=4), marks=slow), moving(machine(3, warps=4))]
)
def test_without_a_signal_or_a_wait_a_plan_is_refused(target: Machine) -> None:
    plans = overlapped(target)
    verify(plans)
    count = 0
    for changed in damaged(plans[0]):
        count += 1
        with pytest.raises(ark.PlanError):
            verify([changed, plans[1]])
    assert count > 10


def test_plans_are_the_same_each_time() -> None:
    assert overlapped(machine(5, warps=4)) == overlapped(machine(5, warps=4))


@pytest.mark.parametrize("case", ["engine", "two readers", "small", "residual", "off"])
def test_unsupported_collectives_are_not_overlapped(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "small":
        monkeypatch.setattr("ark.lower.rewrite.overlap_collectives.in_packets", lambda *_: True)

    def make(rank: int) -> None:
        a, b = ark.tensor([64, 32], name="a"), ark.tensor([32, 64], name="b")
        y = ark.matmul(a, b)
        engine = {"engine": "threads"} if case == "engine" else {}
        total = ark.all_reduce(y, rank, 2, **engine)
        if case == "residual":
            total = ark.add(total, ark.tensor([64, 64], name="residual"))
        keep(total, "y")
        if case == "two readers":
            keep(ark.relu(y), "z")

    plans = build(2, make, machine(4, warps=4), overlap=case != "off")
    verify(plans)
    assert not any(op.kind == "arrival" for op in plans[0].ops)


def test_engine_that_copies_between_rounds() -> None:
    check("cpu", 2, "bfloat", overlap=DMA)
