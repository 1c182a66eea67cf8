"""Placements: the blocks of one micro-batch, with their devices and memory, read from JSON.

A placement is the input of the search for pipeline schedules (ark.parallel.pipeline.tessel). Files
are checked here against a schema; named shapes are in ark.parallel.pipeline.shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Annotated

import msgspec
from msgspec import Meta

from ark.errors import InvalidUsageError, ModelError
from ark.machine.ranges import Name

MOST_DEVICES = 256
MOST_BLOCKS = 256

Span = Annotated[int, Meta(ge=1, le=1 << 20)]
MAX_MEMORY_UNITS = 1 << 40
Memory = Annotated[int, Meta(ge=-MAX_MEMORY_UNITS, le=MAX_MEMORY_UNITS)]
Device = Annotated[int, Meta(ge=0, lt=MOST_DEVICES)]


class Block(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the work on a micro-batch, such as the forward pass through one stage. It runs
    without interruption, on all of its devices at the same time.

    span: the block's time, in any unit. memory: the units that the block allocates on each of its
    devices when it starts; a negative number frees memory. after: blocks of the same micro-batch
    that must have ended before.
    """

    name: Name
    span: Span
    memory: Memory = 0
    devices: Annotated[tuple[Device, ...], Meta(min_length=1, max_length=MOST_DEVICES)] = (0,)
    after: Annotated[tuple[Name, ...], Meta(max_length=MOST_BLOCKS)] = ()


class Placement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of one micro-batch, each with the devices on which it runs. `checked` validates
    them.

    Examples:
        >>> ark.parallel.Placement.from_json(
        ...     '{"devices": 1, "blocks":'
        ...     ' [{"name": "f", "span": 1, "memory": 1, "devices": [0], "after": []}]}'
        ... ).blocks[0].name
        'f'
    """

    devices: Annotated[int, Meta(ge=1, le=MOST_DEVICES)]
    blocks: Annotated[tuple[Block, ...], Meta(min_length=1, max_length=MOST_BLOCKS)]

    @classmethod
    def from_json(cls, text: str | bytes) -> Placement:
        """Reads a placement. Raises ModelError with the reason if it is not valid."""
        try:
            placement = msgspec.json.decode(text, type=cls, strict=True)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ModelError(
                f"the placement is damaged: {error}; expected "
                '{"devices": 4, "blocks": [{"name", "span", "memory", "devices", "after"}, ...]}'
            ) from error
        return placement.checked()

    def checked(self) -> Placement:
        """Returns the placement itself. Raises ModelError if names, devices or dependencies
        contradict each other, or if a number is out of range.
        """
        try:
            msgspec.convert(msgspec.to_builtins(self), Placement)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ModelError(f"the placement is damaged: {error}") from error
        names = [block.name for block in self.blocks]
        for name in names:
            if names.count(name) > 1:
                raise ModelError(f"two blocks have the name {name!r}; give each block its own name")
        for block in self.blocks:
            for device in block.devices:
                if device >= self.devices or block.devices.count(device) > 1:
                    raise ModelError(
                        f"block {block.name!r} runs on devices {list(block.devices)}; each must be "
                        f"listed once and be one of 0 to {self.devices - 1}"
                    )
            for name in block.after:
                if name not in names:
                    raise ModelError(
                        f"block {block.name!r} comes after {name!r}, which does not exist; the "
                        f"blocks are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
                    )
        self.order()
        return self

    def order(self) -> list[int]:
        """The numbers of the blocks, ordered so that each block comes after those on which it
        depends.
        """
        number = {block.name: i for i, block in enumerate(self.blocks)}
        before = {i: [number[n] for n in b.after] for i, b in enumerate(self.blocks)}
        try:
            return list(TopologicalSorter(before).static_order())
        except CycleError as error:
            cycle = " after ".join(self.blocks[i].name for i in error.args[1])
            raise ModelError(
                f"the blocks wait for each other: {cycle}; remove a dependency of this cycle"
            ) from None

    def edges(self) -> list[tuple[int, int]]:
        """Pairs (before, after) of the numbers of blocks that depend directly on each other."""
        number = {block.name: i for i, block in enumerate(self.blocks)}
        return [(number[n], i) for i, b in enumerate(self.blocks) for n in dict.fromkeys(b.after)]

    def on(self, device: int) -> list[int]:
        """The numbers of the blocks that run on a device."""
        return [i for i, block in enumerate(self.blocks) if device in block.devices]

    def load(self, device: int) -> int:
        """The total time of the blocks of one micro-batch on a device."""
        return sum(self.blocks[i].span for i in self.on(device))

    def latency(self) -> int:
        """The time of the longest chain of dependent blocks."""
        ends = [0] * len(self.blocks)
        before: dict[int, list[int]] = {i: [] for i in range(len(self.blocks))}
        for a, b in self.edges():
            before[b].append(a)
        for i in self.order():
            ends[i] = max((ends[a] for a in before[i]), default=0) + self.blocks[i].span
        return max(ends)


def limits(placement: Placement, memory: int | Sequence[int]) -> tuple[int, ...]:
    """The memory of each device. memory: one number for all devices, or one number per device.
    Raises InvalidUsageError for any other value.
    """
    given = [memory] * placement.devices if isinstance(memory, int) else list(memory)
    if len(given) != placement.devices or any(
        not isinstance(m, int) or not 0 <= m <= MAX_MEMORY_UNITS for m in given
    ):
        raise InvalidUsageError(
            f"memory={memory!r:.80} is not valid; give a whole number of at least 0 and at most "
            f"{MAX_MEMORY_UNITS}, or one for each of the {placement.devices} devices"
        )
    return tuple(given)
