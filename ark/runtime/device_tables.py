"""A plan's tables on the device of an executor, and how they follow external buffers to other
addresses. Called by ark.runtime.loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ark.backend.devices import KernelDevice, Memory
from ark.codegen import layout
from ark.plan.types import Plan, PlanTensor
from ark.runtime import tables
from ark.runtime.kernels import Kernel, box_maps, map_images, opcodes
from ark.runtime.placements import Placements

ARRAYS = ("tasks", "counter_ops", "fetches", "growths", "ranges")


class DeviceTables:
    """host: the tables as they were written last; arrays: where each lies on the device."""

    def __init__(
        self,
        plan: Plan,
        kernels: Sequence[Kernel],
        device: KernelDevice,
        alloc: Callable[[int], Memory],
        tensor_address: Callable[[PlanTensor], int],
        buffer_address: Callable[[int], int],
        counter_address: Callable[[int], int],
        own_count: Callable[[int], int],
    ) -> None:
        """alloc: memory of so many bytes; the addresses: as they are when asked. own_count: see
        tables.build.
        """
        self._plan, self._kernels, self._device, self._alloc = plan, kernels, device, alloc
        self._tensor_address = tensor_address
        self._buffer_address, self._counter_address = buffer_address, counter_address
        self._own_count = own_count
        self._cells: dict[int, np.ndarray | None] | None = None
        self._placements: Placements | None = None
        count = sum(len(m) for m in box_maps(kernels))
        self._maps = alloc(count * layout.MAP_BYTES) if count else None
        listed = tables.listed(plan)
        self._lists = alloc(8 * listed) if listed else None
        self.host = self.build()
        self.arrays = {name: self._upload(getattr(self.host, name)) for name in ARRAYS}

    def build(self) -> tables.Tables:
        """The tables for the present addresses; box maps are written to the device first."""
        maps = box_maps(self._kernels)
        first, images = map_images(self._plan, maps, self._device, self._tensor_address)
        memory = self._maps
        if memory is not None:
            self._device.write(memory.address, np.frombuffer(images, np.uint8))
        base = memory.address if memory is not None else 0
        made = tables.build(
            self._plan,
            opcodes(self._kernels),
            self._buffer_address,
            self._counter_address,
            maps,
            lambda op, i: base + (first[op] + i) * layout.MAP_BYTES,
            self._lists.address if self._lists is not None else 0,
            self._own_count,
        )
        if self._lists is not None:
            self._device.write(self._lists.address, made.lists)
        return made

    def _upload(self, array: np.ndarray) -> Memory:
        memory = self._alloc(array.nbytes)
        self._device.write(memory.address, array)
        return memory

    @property
    def replaced(self) -> int:
        """A number that changes when a table of tasks that held before is overwritten."""
        return self._placements.replaced if self._placements is not None else 0

    def move(
        self,
        externals: dict[int, int],
        moved: Mapping[int, int],
        wait_idle: Callable[[], None],
    ) -> None:
        """Moves some external buffers, by id, to other addresses, in `externals` too. wait_idle:
        waits for what runs, where there is no room for another set of tables.
        """
        if self._cells is None:
            self._cells = tables.cells(self._plan, self.host)
            first = self.arrays["tasks"]
            self._placements = Placements(tuple(externals.values()), first, self._alloc)
        words, cells, again = self.host.tasks.view(np.int64), self._cells, False
        for number, address in moved.items():
            distance = address - externals[number]
            externals[number] = address
            places = cells.get(number, ())
            if places is None:
                again = True
            elif len(places):
                words[places] += distance
        where = tuple(externals.values())
        assert self._placements is not None
        if again:  # tables of which there is one copy hold addresses too
            wait_idle()
            self.host = self.build()
            for name, memory in self.arrays.items():
                self._device.write(memory.address, getattr(self.host, name))
            self._placements.only(where, self.arrays["tasks"])
            return
        table = self._placements.find(where)
        if table is None:
            write = self._device.write
            table = self._placements.add(where, self.host.tasks, write, wait_idle)
        self.arrays["tasks"] = table
