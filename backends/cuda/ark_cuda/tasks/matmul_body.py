"""The base class of CUDA's bodies (device functions) of matrix products."""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.tasks import text
from ark.tasks.row_values import HEADER
from ark_cuda.tasks import inline, products


class MatmulBody(Body):
    """A device function of matrix products. Subclasses define which products it supports."""

    kind = "matmul"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("mma", "async_copies", "matmul", "exact", "exact_units")
        own = [inline.header(f"{n}.h") for n in names if machine.has(Capability.MMA_SYNC)]
        if products.serves_machine(machine):
            half = "wgmma.h" if machine.has(Capability.WGMMA) else "tcgen05.h"
            own += [inline.header("products.h"), inline.header(half)]
        if products.serves_machine(machine) and machine.has(Capability.CODE_BOXES):
            codes = ("float_pairs.h", "linear_codes.h", "code_pairs.h", "code_products.h")
            own += [HEADER, *map(inline.header, codes)]
        return (text.header("rotary.h"), text.header("gates.h"), text.header("tiles.h"), *own)
