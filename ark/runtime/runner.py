"""Loads plans: `load` takes a plan and a backend and returns a Runner, which launches the plan, as
a loop kernel or by the backend's own means. Called by ark.runtime.runtime, ark.models.generate and
ark.interop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from ark.backend.devices import Device
from ark.backend.protocol import Backend
from ark.machine import Machine
from ark.plan.types import Plan, PlanTensor
from ark.runtime.admission import admit_rank
from ark.runtime.executor import BUDGET_S, Executor
from ark.runtime.run import Ranks, Run


class Runner(Protocol):
    """A loaded plan. ark.runtime.executor.Executor has the same methods and documents them."""

    plan: Plan
    machine: Machine

    def start(self, iterations: int | Sequence[int], persistent: bool = False) -> Run: ...

    def resume(self, iterations: int = 1, stream: int | None = None) -> Run: ...

    def rebind(self, externals: Mapping[int, int]) -> None: ...

    def end(self) -> int: ...

    def buffer_address(self, buffer_id: int) -> int: ...

    def tensor_address(self, tensor: PlanTensor) -> int: ...

    def find(self, name: str) -> PlanTensor: ...

    def write(self, name: str, values: np.ndarray) -> None: ...

    def read(self, name: str) -> np.ndarray: ...

    def host_view(self, name: str) -> np.ndarray: ...

    def device_bytes(self) -> int: ...

    def close(self, collective: bool = True) -> bool: ...


@runtime_checkable
class PlanBackend(Backend, Protocol):
    """The backend of a vendor that executes plans without a loop kernel, because its processors
    share no memory. It uses from the plan the ops, the memory accesses of their tasks, and the
    processor of each task. It orders the tasks itself.
    """

    def executor(
        self,
        plan: Plan,
        device: Device,
        *,
        externals: Mapping[int, int] | None = None,
        trace_records: int = 0,
        budget_s: float = BUDGET_S,
    ) -> Runner:
        """Loads a plan. Raises, before anything runs, UnsupportedError if the hardware cannot run
        it, and SystemError if memory or a compiler fails.
        """
        ...


def load(
    plan: Plan,
    backend: Backend,
    device: Device,
    *,
    ranks: Ranks | None = None,
    externals: Mapping[int, int] | None = None,
    trace_records: int = 0,
    budget_s: float = BUDGET_S,
) -> Runner:
    """Checks a plan (ark.runtime.admission) and loads it. For arguments and errors see
    ark.runtime.executor.Executor. All ranks of a plan call this together.
    """
    admit_rank(plan, device, ranks)
    if isinstance(backend, PlanBackend):
        return backend.executor(
            plan, device, externals=externals, trace_records=trace_records, budget_s=budget_s
        )
    return Executor(
        plan,
        backend,
        device,
        ranks=ranks,
        externals=externals,
        trace_records=trace_records,
        budget_s=budget_s,
    )
