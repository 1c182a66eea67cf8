"""Sums by the switch between GPUs, through multimem instructions. They are used if the ranks'
symmetric memory is also mapped as multicast memory (ArkParams.multicast); otherwise the
vendor-independent body is used. switch.h has the device code.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import combine, text
from ark.tasks.combine import CombineParams
from ark_cuda.tasks import inline


class SwitchSum(Body):
    """The body that adds all ranks' data by the switch."""

    kind = "switch"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return machine.has(Capability.PEER_MULTICAST)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        element = combine.ELEMENTS[sig.read(CombineParams).element]
        result = combine.shares(sig)
        loads = combine.Combine().source(f"{name}_loads", sig, machine)
        size = element.itemsize
        body = (
            "  const ark_u64 apart = ARK_PARAMS(c)->multicast;\n"
            f"  if (apart == 0u) {{\n    {name}_loads(c, t);\n    return;\n  }}\n"
            f"  const ark_u64 at = apart + static_cast<ark_u64>(t.coord[0]) * {size}u;\n"
            f"  const ark_i64 bytes = static_cast<ark_i64>(t.coord[1] - t.coord[0]) * {size};\n"
            f"  ark_switch_sum<{element.storage}>({text.address(sig, 0)} + at, "
            f"{text.address(sig, result)} + at, bytes);\n"
        )
        return loads + text.function(name, body)

    def headers(self, machine: Machine) -> tuple[str, ...]:
        return (inline.header("switch.h"),)
