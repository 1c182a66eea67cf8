"""A plan's iterations as part of a graph of launches that the caller captures and replays.

Launches of an executor count on from one another, which a replay cannot: it would repeat numbers.
So what is captured has an executor of its own, whose counters are cleared before each replay by the
graph itself. Called by ark.interop.torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from ark.backend.devices import Device, GraphDevice
from ark.backend.protocol import Backend
from ark.errors import UnsupportedError
from ark.plan.types import Plan
from ark.runtime.executor import Executor


def record(
    plan: Plan,
    backend: Backend,
    device: Device,
    externals: Mapping[int, int],
    iterations: int,
    stream: int,
) -> Executor:
    """Puts so many iterations into the graph that is being captured on a stream. The executor must
    live as long as the graph is replayed; it must not be started. Replays of one graph must not
    overlap. Raises UnsupportedError where the device has no such graphs.
    """
    if not isinstance(device, GraphDevice):
        raise UnsupportedError(f"devices of {backend.name} capture no graphs of launches")
    with device.recording():
        executor = Executor(plan, backend, device, externals=externals)
        try:
            executor.record(iterations, stream)
        except BaseException:
            executor.close(together=False)
            raise
    return executor
