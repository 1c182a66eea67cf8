"""Adds a plan's iterations to a graph of launches that the caller captures and replays.

An executor's launches continue the counters of the previous launch. A replayed graph cannot do so,
because it repeats the same values. So a captured graph has its own executor, and the graph clears
this executor's counters before each replay. Called by ark.interop.torch.
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
    """Adds a number of iterations to the graph that is being captured on a stream. The returned
    executor must exist as long as the graph is replayed, and must not be started otherwise. Replays
    of one graph must not overlap. Raises UnsupportedError if the device cannot capture graphs.
    """
    if not isinstance(device, GraphDevice):
        raise UnsupportedError(
            f"devices of {backend.name} cannot capture graphs of launches; launch the plan "
            "without a graph"
        )
    with device.recording():
        executor = Executor(plan, backend, device, externals=externals)
        try:
            executor.record(iterations, stream)
        except BaseException:
            executor.close(collective=False)
            raise
    return executor
