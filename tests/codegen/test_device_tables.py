"""Operands with tensor maps have other addresses in each launch. Each copy of the task table has
separate tensor maps for the addresses of its launch. The device here is a stand-in that only
records writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from ark_cuda import backend

from ark.backend import registry
from ark.backend.codegen.writer import write
from ark.backend.devices import Memory
from ark.ir.dtype import bf16
from ark.ir.graph import Graph
from ark.lower.pipeline import plan as make_plan
from ark.plan.serialize import machine_of
from ark.plan.types import PlanTensor
from ark.runtime.device_tables import DeviceTables
from ark.runtime.kernels import Kernel
from ark.runtime.placements import MAX_TABLES


class Kept:
    """A device whose memory is a dictionary by address. In place of a tensor map it stores the
    address of the mapped matrix, repeated.
    """

    def __init__(self) -> None:
        self.memory = np.zeros(1 << 24, np.uint8)
        self.end, self.mapped = 256, 0

    def alloc(self, nbytes: int) -> Memory:
        begin, self.end = self.end, self.end + -(-nbytes // 256) * 256
        return Memory(begin, nbytes, "device")

    def write(self, address: int, data: np.ndarray) -> None:
        given = np.ascontiguousarray(data).view(np.uint8).ravel()
        self.memory[address : address + len(given)] = given

    def box_map(self, box: Any, address: int) -> bytes:
        self.mapped += 1
        return np.full(16, address, np.uint64).tobytes()

    def words(self, address: int, count: int) -> np.ndarray:
        return self.memory[address : address + 8 * count].view(np.uint64)


def test_each_table_has_its_own_box_maps() -> None:
    graph = Graph()
    shapes = {"a": (512, 1024), "b": (512, 1024), "c": (512, 512)}
    a, b, c = (graph.tensor(s, bf16, arena="external", name=n) for n, s in shapes.items())
    graph.add("matmul", [a, b], [c], {"transpose_a": False, "transpose_b": True}, "product")
    planned = make_plan(graph, registry.machine("h100"))
    assert planned.variant == "matrix"
    emitted = write(planned, machine_of(planned), backend.dialect("sm_90a"))
    kernel: Any = Kernel(range(1), machine_of(planned), SimpleNamespace(emitted=emitted), None)  # type: ignore[arg-type]
    device: Any = Kept()
    left, right, out = (planned.tensors[t].buffer for t in planned.ops[0].operands)
    places = {left: 1 << 32, right: 2 << 32, out: 3 << 32}

    def address(tensor: PlanTensor) -> int:
        return places[tensor.buffer] + tensor.first_byte

    tables = DeviceTables(
        planned,
        [kernel],
        device,
        device.alloc,
        address,
        places.__getitem__,
        lambda _: 0,
        lambda _: 0,
    )
    record = tables.host.tasks.dtype.itemsize // 8
    where = tables.host.tasks.dtype.fields["operand"][1] // 8

    def looked_at(table: int) -> set[tuple[int, ...]]:
        """Returns, for each task of a table, its operands and the addresses in its tensor maps."""
        rows = device.words(table, record * len(tables.host.tasks)).reshape(-1, record)
        operands = rows[:, where : where + 5].tolist()
        return {(*r[:3], *(int(device.words(m, 1)[0]) for m in r[3:])) for r in operands}

    def wanted() -> set[tuple[int, ...]]:
        three = places[left], places[right], places[out]
        return {(*three, *three[:2])}

    assert looked_at(tables.arrays["tasks"].address) == wanted()
    before, first = device.mapped, tables.arrays["tasks"].address
    was, waited = wanted(), []
    kept = {}
    for number in range(1, MAX_TABLES + 4):
        tables.move(places, {left: (4 << 32) + number * 4096}, lambda: waited.append(1))
        now = tables.arrays["tasks"].address
        assert looked_at(now) == wanted()
        kept[now] = wanted()
        if number < MAX_TABLES:
            assert looked_at(first) == was and not waited
    assert waited == [1] * 4  # one wait for each replaced table
    assert device.mapped == before + MAX_TABLES + 3  # tensor maps of the moved matrix
    for table, copied in kept.items():
        assert looked_at(table) == copied
    tables.move(places, {out: 5 << 32}, lambda: None)
    assert looked_at(tables.arrays["tasks"].address) == wanted()
    assert device.mapped == before + MAX_TABLES + 3
