"""The gradients of attention on mma.sync, in variants whose shared memory holds the tiles. It
supports bf16 and fp16, heads of up to 128 elements (multiples of 8), and any mask.
attention_gradient.h has the device code. Called through the dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention_gradient import (
    MAX_UNIT_HEAD_ELEMENTS,
    AttentionGradientParams,
    given,
    outputs,
    shape,
)
from ark.tasks.attention_tiles import where_aligned
from ark_cuda.tasks import inline
from ark_cuda.tasks.attention_units import SHARED_ROW_BYTES, SLAB_ROWS, TYPES

COLUMNS, PART, SLOTS = 64, 32, 3  # rows of a block, those multiplied at once, blocks in memory
# Elements of a head: with more, sums of keys and of values need two passes.
MAX_JOINED_HEAD_ELEMENTS = 64
STATISTICS_BYTES = 8  # of a query


class Units(Body):
    """The gradients of attention of a tile of keys or of queries."""

    kind = "attention_gradient"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        p = sig.read(AttentionGradientParams)
        whole = [sig.operands[i] for i in (0, 1, 2, 3, *outputs(sig))]
        kinds = {o.dtype for o in whole}
        return (
            machine.has(Capability.MMA_SYNC)
            and not inline.leads(machine)
            and len(kinds) == 1
            and kinds <= set(TYPES)
            and p.head_dim % 8 == 0
            and p.head_dim <= MAX_UNIT_HEAD_ELEMENTS
            and p.rows <= SLAB_ROWS * machine.warps
            and p.scale > 0.0
            and all(s % 8 == 0 for o in whole for s in o.strides[:-1])
            and self.scratch(sig, machine) <= machine.task_bytes
        )

    def scratch(self, sig: Signature, machine: Machine) -> int:
        width = sig.read(AttentionGradientParams).head_dim
        pitch = -(-width // (SHARED_ROW_BYTES // 2)) * SHARED_ROW_BYTES
        slot = COLUMNS * (2 * pitch + STATISTICS_BYTES)
        return 2 * SLAB_ROWS * machine.warps * pitch + SLOTS * slot

    def headers(self, machine: Machine) -> tuple[str, ...]:
        if not machine.has(Capability.MMA_SYNC):
            return ()
        own = ("softmax", "units", "sums", "gradient")
        names = ("mma.h", "async_copies.h", *(f"attention_{name}.h" for name in own))
        common = map(text.header, ("pages.h", "attention_tiles.h"))
        return (*common, *map(inline.header, names))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the body. If operands turn out not to be aligned when the kernel runs, it
        calls the vendor-independent body.
        """
        p = sig.read(AttentionGradientParams)
        width, rows = p.head_dim, SLAB_ROWS * machine.warps
        keys, joined = (str(flag).lower() for flag in (p.keys, width <= MAX_JOINED_HEAD_ELEMENTS))
        sizes = (sig.operands[0].ctype, width, keys, rows, COLUMNS, PART, SLOTS, joined)
        units = f"ArkGradientUnits<{', '.join(map(str, sizes))}>"
        scale, *operands = given(sig)
        late = (f"[](const ArkTask& t) {{ (void)t; return {operand}; }}" for operand in operands)
        call = text.called("ark_gradient_units", (units, shape(sig), joined), (scale, *late))
        return where_aligned(name, sig, machine, call, (0, 1, 2, 3, *outputs(sig)))
