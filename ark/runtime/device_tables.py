"""A plan's tables in device memory. They are updated when external buffers get other addresses.
Called by ark.runtime.loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ark.backend.codegen import layout
from ark.backend.devices import KernelDevice, Memory
from ark.plan.types import Plan, PlanTensor
from ark.runtime import tables
from ark.runtime.cells import cells, map_cells
from ark.runtime.kernels import Kernel, box_maps, map_images, opcodes
from ark.runtime.placements import Placements

ARRAYS = ("tasks", "counter_ops", "fetches", "growths", "ranges")


class DeviceTables:
    """The tables of a plan in device memory: arrays of tasks, counter operations and fetches that
    the kernel reads. host: the host's copy of the tables, as last written. arrays: the device
    memory of each table. The box maps (tensor maps for TMA) of the first task table and of
    the operand stream have their own memory. Every further copy of the task table is followed by
    its own box maps, so that a launch that still uses this copy can also use its box maps.
    """

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
        """alloc: a function that allocates a number of bytes. The functions for addresses are
        called whenever tables are built. own_count: see tables.build.
        """
        self._plan, self._kernels, self._device, self._alloc = plan, kernels, device, alloc
        self._tensor_address = tensor_address
        self._buffer_address, self._counter_address = buffer_address, counter_address
        self._own_count = own_count
        self._cells: dict[int, np.ndarray | None] | None = None
        self._map_cells = np.zeros(0, np.int64)
        self._placements: Placements | None = None
        self._box_maps = box_maps(kernels)
        self._images: dict[int, tuple[int, bytes]] = {}
        count = sum(len(m) for m in self._box_maps)
        self._map_bytes = count * layout.MAP_BYTES
        self._maps = alloc(self._map_bytes) if count else None
        self._base = 0  # the address of the box maps that `host` refers to
        listed = tables.listed(plan)
        self._lists = alloc(8 * listed) if listed else None
        self.host = self.build()
        self._maps_at = -(-self.host.tasks.nbytes // layout.MAP_BYTES) * layout.MAP_BYTES
        self.arrays = {name: self._upload(name) for name in ARRAYS}

    def build(self) -> tables.Tables:
        """Writes the box maps (tensor maps for TMA) to the device, and builds the tables for
        the current addresses of buffers.
        """
        maps, memory = self._box_maps, self._maps
        if memory is not None:
            self._device.write(memory.address, self._map_images())
        self._base = base = memory.address if memory is not None else 0
        first = np.cumsum([0, *map(len, maps)]).tolist()
        built = tables.build(
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
            self._device.write(self._lists.address, built.lists)
        return built

    def _map_images(self) -> np.ndarray:
        """All box maps (tensor maps for TMA) in the hardware's format. The maps of memory
        that has not moved are reused.
        """
        device, address = self._device, self._tensor_address
        return map_images(self._plan, self._box_maps, device, address, self._images)

    def _upload(self, name: str) -> Memory:
        array = getattr(self.host, name)
        room = self._maps_at + self._map_bytes if name == "tasks" else array.nbytes
        memory = self._alloc(room)
        self._device.write(memory.address, array)
        return memory

    def _copy(self, address: int) -> np.ndarray:
        """The contents of a copy of the task table, followed by its own box maps. address: the
        device address at which the copy will be stored.
        """
        base = address + self._maps_at
        self.host.tasks.view(np.int64)[self._map_cells] += base - self._base
        self._base = base
        image = np.zeros(self._maps_at + self._map_bytes, np.uint8)
        image[: self.host.tasks.nbytes] = self.host.tasks.view(np.uint8)
        image[self._maps_at :] = self._map_images()
        return image

    @property
    def replaced(self) -> int:
        """A number that grows each time a task table that callers may still use is overwritten."""
        return self._placements.replaced if self._placements is not None else 0

    def move(
        self,
        externals: dict[int, int],
        moved: Mapping[int, int],
        wait_idle: Callable[[], None],
    ) -> None:
        """Changes the addresses of some external buffers to those in `moved` (by buffer id), and
        updates `externals`. wait_idle: waits for running launches; called if existing tables must
        be overwritten.
        """
        if self._cells is None:
            self._cells = cells(self._plan, self.host)
            self._map_cells = map_cells(self._plan, self.host, self._box_maps)
            first = self.arrays["tasks"]
            self._placements = Placements(tuple(externals.values()), first, self._alloc)
        words, of_buffer, rebuild = self.host.tasks.view(np.int64), self._cells, False
        for number, address in moved.items():
            distance = address - externals[number]
            externals[number] = address
            places = of_buffer.get(number, ())
            if places is None:
                rebuild = True
            elif len(places):
                words[places] += distance
        where = tuple(externals.values())
        assert self._placements is not None
        if rebuild:  # tables that have no copies contain addresses too
            wait_idle()
            self.host = self.build()
            for name, memory in self.arrays.items():
                self._device.write(memory.address, getattr(self.host, name))
            self._placements.only(where, self.arrays["tasks"])
            return
        table = self._placements.find(where)
        if table is None:
            table = self._placements.add(where, self._copy, self._device.write, wait_idle)
        self.arrays["tasks"] = table
