"""All-reduce and optimizer update as one kernel, chosen by `autotune`, with moments of 2 N / n.

Executed on CPU ranks and compared with the one-device graph. Overlap is by counters between chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from ark.backend import registry as backends
from ark.errors import ModelError
from ark.lower.ranks import plan_ranks
from ark.parallel import ParallelGraph, autotune, materialise
from ark.parallel.plans import coconet
from ark.parallel.plans.times import Rates
from ark.plan.types import Plan
from tests.cases import coconet as coco
from tests.cases.transform import on_cpu_ranks
from tests.interpreter import Interpreter

SLOW_MEMORY = Rates(1e6, 1.0, 1e9, 0.0)
WHOLE = 16 * coco.WIDTH * 4  # bytes of one moment


def lamb_reordered(plan: ParallelGraph) -> None:
    """Transforms a plan that has LAMB's update: a reduce-scatter, then the update and the partial
    sums of its norms on slices, then an all-gather. Each rank keeps its slice of the moments.
    """
    parts = coconet.split(plan, coco.named(plan, "gradient"))
    sliced, chosen = {parts.outputs[0].buffer.id}, []
    for node in plan.nodes:
        read = {t.buffer.id for t in node.inputs}
        if node.outputs[0].shape == (1, 1) and not read & sliced:
            continue  # an op on norms, which all ranks compute
        if read & sliced:
            chosen.append(node)
            if node.outputs[0].shape != (1, 1):
                sliced.add(node.outputs[0].buffer.id)
    coconet.reorder(plan, parts, chosen)
    for name in {t.buffer.name for t in plan.graph.tensors if t.name == "state"}:
        coconet.as_slice(plan, name)


def fused(plan: ParallelGraph, transform: Callable[[ParallelGraph], None]) -> None:
    transform(plan)
    update = [n for n in plan.nodes if n.type not in ("matmul",) and n.name != "gradient.copy"]
    coconet.fuse(plan, update)


WAYS = {
    "adam": {
        **coco.WAYS,
        "fused": functools.partial(fused, transform=coco.reordered),
    },
    "lamb": {
        "AR-compute": coco.nothing,
        "RS-AG-compute": coco.scattered,
        "RS-compute-AG": lamb_reordered,
    },
}


def one_device(kind: str, steps: int) -> dict[str, np.ndarray]:
    """Runs some steps of the untransformed graph on one device. Returns the final contents of the
    memory that outlives an iteration, and the initial ones.
    """
    graph, memory = coco.update(kind), Interpreter()
    given = contents(coco.started(kind))
    by_name = {
        t.buffer.name: t
        for t in graph.tensors
        if t.shape == t.extents and t.buffer.arena != "activation"
    }
    for name, array in given.items():
        memory.view(by_name[name])[...] = array
    for _ in range(steps):
        memory.run(graph, 0)
    return {name: memory.view(tensor).copy() for name, tensor in by_name.items()}


def contents(plan: ParallelGraph) -> dict[str, np.ndarray]:
    random, result = np.random.default_rng(1), {}
    for tensor in plan.graph.tensors:
        if tensor.buffer.arena != "activation" and tensor.shape == tensor.extents:
            values = np.abs(random.integers(-3, 4, tensor.shape)).astype(np.float32)
            result.setdefault(tensor.buffer.name, values)
    return result


def planned(plan: ParallelGraph) -> list[Plan]:
    return list(plan_ranks(materialise(plan).graphs, backends.machine("cpu-2")))


@pytest.mark.parametrize("kind", WAYS)
def test_autotune_takes_slices_where_memory_is_slow(kind: str) -> None:
    ways = dict(WAYS[kind])
    ways["wrong"] = lambda plan: coconet.reorder(plan, plan.nodes[0], [])
    tuned = autotune(lambda: coco.started(kind), ways, SLOW_MEMORY)
    assert tuned.name in ("RS-compute-AG", "fused") and set(tuned.us) == set(WAYS[kind])
    assert tuned.us[tuned.name] < 0.9 * tuned.us["AR-compute"] and "wrong" in tuned.refused
    # If a step of a collective takes long, a single all-reduce is the fastest.
    dear = autotune(lambda: coco.started(kind), WAYS[kind], Rates(1e6, 1e9, 1e9, 100.0))
    assert dear.us["AR-compute"] <= 1.01 * dear.us["RS-AG-compute"]


@pytest.mark.parametrize("kind", WAYS)
def test_chosen_update_is_one_kernel_with_sliced_moments(kind: str) -> None:
    """Checks the plan's figures: one kernel for each rank, and N / n bytes of each moment."""
    tuned = autotune(lambda: coco.started(kind), WAYS[kind], SLOW_MEMORY)
    moments = {"adam": 2, "lamb": 1}[kind]
    for graph in tuned.ranks.graphs:
        plans = plan_ranks([graph], backends.machine("cpu-1"))
        assert len(plans[0].kernels) == 1
        sizes = [
            b.nbytes for b in plans[0].buffers if b.name.partition(".")[0] in ("state", "square")
        ]
        assert sizes == [WHOLE // coco.RANKS] * moments
    for plan in planned(coco.started(kind)):  # AR-compute keeps all moments on every rank
        sizes = [b.nbytes for b in plan.buffers if b.name.partition(".")[0] in ("state", "square")]
        assert sizes == [WHOLE] * moments


@pytest.mark.parametrize("kind", WAYS)
def test_on_cpu_ranks_it_is_the_one_device_update(kind: str) -> None:
    """Two iterations of the fused all-reduce and update on four CPU ranks give the result of the
    untransformed graph.
    """
    tuned = autotune(lambda: coco.started(kind), WAYS[kind], SLOW_MEMORY)
    start = coco.started(kind)
    names = {t.buffer.id: t.buffer.name for t in start.graph.tensors}
    lasting = {n.outputs[0].buffer.id for n in start.nodes} & set(start.versions)
    want, kept = one_device(kind, 2), set()
    for view, array in on_cpu_ranks(tuned.ranks, contents(start), lasting):
        whole = want[names[view.buffer]]
        box = tuple(slice(*side) for side in view.box)
        np.testing.assert_allclose(array, whole[box], rtol=2e-5, atol=2e-5)
        kept.add(names[view.buffer].partition(".")[0])
    assert kept == {"w", "state", *(["square"] if kind == "adam" else [])}


def test_fusing_leaves_the_update_in_one_run() -> None:
    plan = coco.started("adam")
    WAYS["adam"]["fused"](plan)
    order = [piece.node.type for piece in plan.in_order()]
    assert order[0] == "matmul" and "matmul" not in order[coco.RANKS :]
    split = coco.started("adam")
    with pytest.raises(ModelError, match=r"fuse .+ too"):
        ends = [n for n in split.nodes if n.type in ("mul", "sub")]
        coconet.fuse(split, [ends[0], ends[-1]])


def test_overlap_is_counters_between_chunks() -> None:
    """The all-reduce of the first chunk waits for the tiles of the first product and not for the
    tiles of the second. The number of kernels stays one.
    """
    plain = planned(coco.product())
    plan = coco.product()
    coconet.overlap(plan, coco.named(plan, "product"), coco.named(plan, "relu"), 0, 2)
    for own, before in zip(planned(plan), plain, strict=True):
        assert len(own.kernels) == len(before.kernels) == 1
        products = [op.id for op in own.ops if op.kind == "linear"]
        sends = [op.id for op in own.ops if op.name.endswith("put+1")]
        assert len(products) == len(sends) == 2
        tasks = [t for row in own.phases[0].processors for t in row]
        result = [{c for t in tasks if t.op == op for c in t.signals} for op in products]
        waited = [{c for t in tasks if t.op == op for c, _ in t.waits} for op in sends]
        order = [t.op for t in tasks]
        assert waited[0] & result[0] and not waited[0] & result[1]
        assert order.index(products[0]) < order.index(sends[0])
