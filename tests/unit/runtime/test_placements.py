"""A kernel's external buffers may have other addresses in each launch. The task tables that are
updated for new addresses must equal tables that are built for these addresses.
"""

from __future__ import annotations

import numpy as np

import ark
from ark.plan.types import Plan
from ark.runtime.executor import Executor
from ark.runtime.placements import MAX_TABLES
from ark.runtime.session import backend, device


def test_moved_tables_are_those_that_would_be_built() -> None:
    """The tables of a kernel whose external buffers moved equal newly built ones. The kernel has a
    product with fetched weights and elementwise ops; each of three launches has other addresses.
    """
    ark.init(backend="cpu")
    x, w = ark.placeholder([4, 8]), ark.placeholder([16, 8])
    y = ark.placeholder([4, 16])
    ark.add(ark.relu(ark.linear(x, w)), ark.reduce_sum(x, 1), output=y)
    plan = ark.Planner(-1).plan().inner
    assert plan is not None
    ids = [b.id for b in plan.buffers if b.arena == "external"]
    sizes = [b.nbytes // 4 for b in plan.buffers if b.arena == "external"]
    random = np.random.default_rng(0)
    executor = None
    for moved in ([0, 1, 2], [0], [1, 2]):
        arrays = [random.normal(size=n).astype(np.float32) for n in sizes]
        if executor is None:
            kept = arrays
            places = dict(zip(ids, (a.ctypes.data for a in kept), strict=True))
            executor = Executor(plan, backend(), device(), externals=places)
        else:
            kept = [arrays[i] if i in moved else kept[i] for i in range(3)]
            executor.rebind({i: a.ctypes.data for i, a in zip(ids, kept, strict=True)})
        built = executor._tables.build()
        for name in ("tasks", "fetches", "counter_ops", "lists"):
            assert (getattr(executor.tables, name) == getattr(built, name)).all(), name
        executor.start(1).wait()
        names = {b.id: b.name for b in plan.buffers}
        by_name = {names[i]: a for i, a in zip(ids, kept, strict=True)}
        a, b = (by_name[t.ir.buffer.name].reshape(t.shape()) for t in (x, w))
        want = np.maximum(a @ b.T, 0) + a.sum(1, keepdims=True)
        np.testing.assert_allclose(by_name[y.ir.buffer.name].reshape(4, 16), want, rtol=1e-5)
    assert executor is not None
    executor.close()


def _adding() -> tuple[Plan, list[int], list[np.ndarray]]:
    """Returns a plan that adds 1 to an external buffer, the ids of its two buffers, and 25
    arrays.
    """
    ark.init(backend="cpu")
    x, y = ark.placeholder([64]), ark.placeholder([64])
    ark.add(x, 1.0, output=y)
    plan = ark.Planner(-1).plan().inner
    assert plan is not None
    names = {b.name: b.id for b in plan.buffers if b.arena == "external"}
    ids = [names[t.ir.buffer.name] for t in (x, y)]
    return plan, ids, [np.full(64, 0.0, np.float32) for _ in range(25)]


def test_launch_in_flight_keeps_its_memory() -> None:
    """If buffers move during a launch, that launch still writes to the memory with which it was
    started.
    """
    plan, ids, (source, first, second, *_) = _adding()
    places = dict(zip(ids, (source.ctypes.data, first.ctypes.data), strict=True))
    with Executor(plan, backend(), device(), externals=places) as executor:
        run = executor.resume(20_000)
        executor.rebind({ids[1]: second.ctypes.data})
        run.wait()
        assert run.iterations_done == 20_000
        assert (first == 1.0).all() and (second == 0.0).all()
        executor.resume().wait()
        assert (second == 1.0).all()


def test_tables_of_the_last_addresses_are_kept() -> None:
    """Tables for recently used addresses are cached. If there are too many, the oldest table is
    replaced.
    """
    plan, ids, (source, *targets) = _adding()
    places = dict(zip(ids, (source.ctypes.data, targets[0].ctypes.data), strict=True))
    written: list[int] = []
    with Executor(plan, backend(), device(), externals=places) as executor:
        executor.resume().wait()
        write = executor.device.write
        executor.device.write = lambda *a: (written.append(1), write(*a))  # type: ignore
        for call in range(6):
            executor.rebind({ids[1]: targets[call % 3].ctypes.data})
            executor.resume().wait()
        assert len(written) == 2
        held = executor.device_bytes()
        for call, target in enumerate(targets * 2):
            source[:] = call
            executor.rebind({ids[1]: target.ctypes.data})
            executor.resume().wait()
            assert (target == call + 1).all()
        assert len(executor._tables._placements._copies) == MAX_TABLES
        assert executor.device_bytes() == held + (MAX_TABLES - 3) * 256
        executor.device.write = write  # type: ignore[method-assign]
