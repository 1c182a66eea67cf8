"""A simulated mesh of processor cores with private memory, which exchange messages between
supersteps. A loop kernel needs memory that processors share, which a mesh does not have. So this
backend executes plans by its own means (ark.runtime.runner.PlanBackend). docs/mesh.md describes its
purpose and limits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ark_cpu.probe import probe as host_probe

from ark.backend.devices import Device
from ark.backend.protocol import Probe
from ark.errors import InvalidUsageError
from ark.machine import Machine
from ark.plan.types import Plan
from ark_mesh import machines
from ark_mesh.device import MeshDevice, wanted_cores
from ark_mesh.executor import MeshExecutor


class MeshBackend:
    """The backend object that the package's entry point names. It has no state."""

    name = "mesh"

    def probe(self) -> Probe:
        seen = host_probe()
        try:
            count = wanted_cores()
        except InvalidUsageError as error:
            return Probe(reason=str(error), remedy="unset ARK_MESH_CORES")
        host = seen.devices[0] if seen.devices else None
        if host is None:
            return seen
        name = f"simulated mesh of {count} cores with private memory"
        device = dataclasses.replace(host, name=name, memory_bytes=count * machines.CORE_BYTES)
        note = "simulated on the CPU; used only where it is named"
        return dataclasses.replace(seen, devices=(device,), notes=(note,), simulated=True)

    def machine(self, name: str) -> Machine | None:
        return machines.by_name(name)

    def machine_names(self) -> tuple[str, ...]:
        return ("mesh-N",)

    def open(self, index: int) -> MeshDevice:
        return MeshDevice(index)

    def executor(
        self,
        plan: Plan,
        device: Device,
        *,
        externals: Mapping[int, int] | None = None,
        trace_records: int = 0,
        budget_s: float,
    ) -> MeshExecutor:
        assert isinstance(device, MeshDevice)
        return MeshExecutor(
            plan, device, externals=externals, trace_records=trace_records, budget_s=budget_s
        )


backend = MeshBackend()
