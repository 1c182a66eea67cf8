"""Cases and helpers of tests/multi/test_collectives.py, which other tests use too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

import ark
from ark.backend import registry
from ark.backend.devices import Device
from ark.collective import topology
from ark.collective.synthesis import algorithms, synthesize
from ark.frontend.model import Model, use_model
from ark.lower.pipeline import plan as make_plan
from ark.machine import Machine
from ark.plan.types import Plan
from ark.plan.verify import verify
from ark.runtime.executor import Executor
from tests.ranks import ThreadRanks, run_ranks

ROWS, WIDTH = 3, 239  # 717 elements: not divisible by the numbers of ranks, trees or rings
FORESTS = {2: ("full2", "h200:gpus=2"), 4: ("ring4", "star4"), 8: ("dgx1v",)}
SUITE_ITERATIONS = 3


def names(world: int, collective: str) -> list[str]:
    """Returns the names of the algorithms except taccl, which needs a search. On 8 ranks only
    three, to save time.
    """
    actual = algorithms(topology.full_mesh(world), collective)
    some = ("forestcoll", "ring", "double_binary_tree")
    return [a for a in actual if (a in some if world == 8 else a != "taccl")]


CPU_2 = registry.machine("cpu-2")


def build(
    world: int, body: Callable[[int], object], machine: Machine = CPU_2, **options: bool
) -> list[Plan]:
    results = []
    for rank in range(world):
        model = Model(rank, world)
        with use_model(model):
            body(rank)
        results.append(make_plan(model.graph, machine, options))
    return results


def keep(tensor: ark.Tensor, name: str) -> None:
    """Copies a result to a tensor that the test reads by its name."""
    ark.copy(tensor, ark.tensor(tensor.shape(), tensor.dtype(), name=name))


def suite(world: int) -> Callable[[int], None]:
    """Returns the body of a graph with every collective. Its inputs grow by one in every
    iteration.
    """

    def body(rank: int) -> None:
        place = (rank, world)
        x = ark.tensor([ROWS, WIDTH], ark.int32, name="x")
        x = ark.add(x, 1, output=x)
        y = ark.cast(x, ark.fp32)
        z = ark.mul(ark.tensor([ROWS, WIDTH], name="z"), 1.0)
        w = ark.add(ark.tensor([ROWS, WIDTH], ark.int32, name="w"), 0)
        for name in names(world, "all_reduce"):
            keep(ark.all_reduce(y, *place, algorithm=name), f"sum.{name}")
        for name in names(world, "all_gather"):
            keep(ark.all_gather(y, *place, algorithm=name), f"gather.{name}")
        keep(ark.all_reduce(w, *place), "wrapped.one_shot")
        for network in FORESTS[world]:
            forest = {"algorithm": "forestcoll", "topology": network}
            keep(ark.all_reduce(w, *place, **forest), f"wrapped.{network}")
            keep(ark.all_gather(x, *place, **forest), f"gather.int32.{network}")
            keep(ark.all_reduce(z, *place, **forest), f"sum.z.{network}")
        pieces = synthesize(f"ring{world}", "all_reduce", pieces=3)
        keep(ark.all_reduce(y, *place, algorithm=pieces), "sum.pieces")
        few = ark.copy(x[:1, 5:6])  # fewer elements than the trees have chunks
        keep(ark.all_reduce(few, *place, algorithm="forestcoll"), "few")
        strided = ark.all_reduce(y[1:, 7:200], *place, algorithm="forestcoll")
        keep(strided, "strided")
        long = ark.all_gather(x, *place)
        for name in ("forestcoll", "one_shot"):
            part = ark.reduce_scatter(long, *place, algorithm=name)
            keep(part, f"scatter.{name}")
            last = ark.broadcast(y, *place, root=world - 1, algorithm=name)
            keep(last, f"broadcast.{name}")
        keep(ark.all_to_all(ark.mul(long, rank + 1), *place), "swap")
        keep(ark.all_reduce(y[2:], *place, algorithm="forestcoll"), "row")
        own = ark.copy(y)
        keep(ark.all_reduce(own, *place, output=own, algorithm="forestcoll"), "in place")
        below = {"output": own[1:], "algorithm": "double_binary_tree"}
        ark.all_reduce(own[:2], *place, **below)
        keep(own, "shifted")

    return body


def expected(xs: list[np.ndarray], ws: list[np.ndarray], rank: int, name: str) -> np.ndarray:
    """Returns NumPy's result for the integers that the ranks contribute. Sums of ws wrap around."""
    kind = name.split(".", maxsplit=1)[0]
    total = sum(xs)
    world = len(xs)
    return {
        "sum": lambda: total,
        "in place": lambda: total,
        "shifted": lambda: np.concatenate([total[:1], world * total[:2]]),
        "row": lambda: total[2:],
        "wrapped": lambda: np.sum(ws, axis=0, dtype=np.int32),
        "gather": lambda: np.concatenate(xs),
        "few": lambda: total[:1, 5:6],
        "strided": lambda: total[1:, 7:200],
        "scatter": lambda: world * xs[rank],
        "broadcast": lambda: xs[-1],
        "swap": lambda: np.concatenate([(s + 1) * xs[rank] for s in range(world)]),
    }[kind]()


@contextmanager
def devices(name: str, world: int, arch: str = "gfx942") -> Iterator[tuple[list[Device], Machine]]:
    """Opens a device for each rank. Yields the devices and the machine to plan for. AMD devices are
    emulated, with all checks.
    """
    with ExitStack() as stack:
        if name == "rocm":
            emulator = pytest.importorskip("ark_rocm_emulator")
            pytest.importorskip("hip")
            stack.enter_context(emulator.emulated(arch, world, checks=1, compute_units=3))
        elif name != "cpu" and len(registry.probe(name).devices) < world:
            pytest.skip(f"{name} has fewer than {world} devices")
        backend = registry.get(name)
        result = [backend.open(0 if name == "cpu" else rank) for rank in range(world)]
        for device in result:
            stack.callback(device.close)
        machine = registry.machine(f"cpu-{max(1, 4 // world)}") if name == "cpu" else None
        yield result, machine or result[0].machine


def short_suite(world: int) -> Callable[[int], None]:
    """Returns the body of a graph with every collective once, by the default algorithms."""

    def body(rank: int) -> None:
        place = (rank, world)
        x = ark.tensor([ROWS, WIDTH], ark.int32, name="x")
        x = ark.add(x, 1, output=x)
        y = ark.cast(x, ark.fp32)
        keep(ark.all_reduce(y, *place), "sum.any")
        long = ark.all_gather(x, *place)
        keep(long, "gather.any")
        keep(ark.reduce_scatter(long, *place), "scatter.any")
        keep(ark.broadcast(y, *place, root=world - 1), "broadcast.any")
        keep(ark.all_to_all(ark.mul(long, rank + 1), *place), "swap")

    return body


def check_collectives(
    name: str,
    world: int,
    opened: list[Device],
    machine: Machine,
    suite_of: Callable[[int], Callable[[int], None]] = suite,
) -> None:
    plans = build(world, suite_of(world), machine)
    verify(plans)
    random = np.random.default_rng(world)
    xs = [random.integers(-999, 999, (ROWS, WIDTH), np.int32) for _ in range(world)]
    zs = [random.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(world)]
    ws = [random.integers(-(2**31), 2**31, (ROWS, WIDTH), np.int32) for _ in range(world)]
    outputs = [t.name for t in plans[0].tensors if is_output(plans[0], t.id)]
    backend = registry.get(name)

    def work(ranks: ThreadRanks) -> dict[str, np.ndarray]:
        plan, device = plans[ranks.rank], opened[ranks.rank]
        with Executor(plan, backend, device, ranks=ranks, budget_s=200.0) as executor:
            executor.write("x", xs[ranks.rank])
            if suite_of is suite:
                executor.write("z", zs[ranks.rank])
                executor.write("w", ws[ranks.rank])
            executor.start(SUITE_ITERATIONS).wait(250.0)
            actual = {name: executor.read(name) for name in outputs}
            ranks.barrier()
            return actual

    actual = run_ranks(world, work)
    after = [x + SUITE_ITERATIONS for x in xs]
    assert len(outputs) >= (17 if suite_of is suite else 5)
    for rank in range(world):
        for output in outputs:
            got = actual[rank][output]
            if output.startswith("sum.z."):
                np.testing.assert_array_equal(got, actual[0][output])
                exact = np.sum(np.array(zs, np.float64), axis=0)
                np.testing.assert_allclose(got.reshape(exact.shape), exact, rtol=1e-5, atol=1e-5)
            else:
                want = expected(after, ws, rank, output)
                np.testing.assert_array_equal(got.reshape(want.shape), want, output)


def is_output(plan: Plan, tensor: int) -> bool:
    """True if the tensor was written by `keep`."""
    kept = {op.operands[-1] for op in plan.ops if op.name == "copy"}
    return tensor in kept and plan.buffers[plan.tensors[tensor].buffer].initial
