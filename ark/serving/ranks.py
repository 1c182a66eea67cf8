"""Writes an engine's device memory and launches its steps, on one rank or on all ranks of a job.

Rank 0 runs the engine. It sends its writes to device memory and its launches to the other ranks,
which do the same on their devices (`follow`). Tokens are read on rank 0 only. Called by
ark.serving.rows and ark.cli.serve.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
import numpy as np

from ark.errors import InvalidUsageError, SystemError
from ark.runtime.bootstrap import Bootstrap
from ark.runtime.executor import Executor
from ark.runtime.run import Run

LABEL = "engine"
FOREVER_S = 1e9


class Write(msgspec.Struct, frozen=True):
    """Bytes to write to a part of a tensor of the plan. elements: the size of the whole tensor.
    offset: where the part begins, in bytes.
    """

    name: str
    elements: int
    offset: int
    data: bytes


class Order(msgspec.Struct, frozen=True):
    """Rank 0's order to another rank: writes, then a launch with the given number of iterations of
    each phase. An order without iterations ends the engine.
    """

    writes: list[Write]
    iterations: list[int]


class Memory:
    """Writes the tensors of a loaded plan before a launch, on all ranks. ranks: the connection to
    the ranks that share the model, of which this is rank 0; None if there is one rank.
    """

    def __init__(self, executor: Executor, ranks: Bootstrap | None = None) -> None:
        self._executor = executor
        self._ranks = ranks if ranks is not None and ranks.world_size > 1 else None
        self._addresses: dict[str, int] = {}
        self._writes: list[Write] = []

    def write(self, name: str, elements: int, offset: int, values: np.ndarray) -> None:
        """Writes values at a byte offset of a tensor. elements: the size of the whole tensor."""
        if name not in self._addresses:
            tensor = self._executor.find(name, elements)
            self._addresses[name] = self._executor.tensor_address(tensor)
        data = values.reshape(-1).view(np.uint8)
        if self._ranks is not None:
            self._writes.append(Write(name, elements, offset, data.tobytes()))
        self._executor.prepare(self._addresses[name] + offset, data)

    def start(self, iterations: Sequence[int]) -> Run:
        """Launches the given number of iterations of each phase, on all ranks."""
        self._order(iterations)
        return self._executor.start(iterations)

    def close(self) -> None:
        """Tells the other ranks to end, unless the job has failed."""
        with contextlib.suppress(SystemError):
            self._order([])

    def _order(self, iterations: Sequence[int]) -> None:
        if self._ranks is None:
            return
        order = msgspec.msgpack.encode(Order(self._writes, list(iterations)))
        self._writes = []
        for rank in range(1, self._ranks.world_size):
            self._ranks.post(rank, LABEL, order)


def follow(executor: Executor, ranks: Bootstrap) -> None:
    """Repeats the writes and launches of rank 0 on this rank, until rank 0's engine ends."""
    memory = Memory(executor)
    phases = len(executor.plan.phases)
    while True:
        try:
            order = msgspec.msgpack.decode(ranks.collect(0, LABEL, FOREVER_S), type=Order)
        except msgspec.MsgspecError as error:
            raise SystemError(
                f"rank 0 sent a message of an unknown format ({error}); start every rank with the "
                "same version of ark"
            ) from None
        if not order.iterations:
            return
        if len(order.iterations) != phases:
            raise InvalidUsageError(
                f"rank 0 launches {len(order.iterations)} phases, but this rank's plan has "
                f"{phases}; start every rank with the same options"
            )
        for each in order.writes:
            memory.write(each.name, each.elements, each.offset, np.frombuffer(each.data, np.uint8))
        memory.start(order.iterations).wait()
