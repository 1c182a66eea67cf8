"""Task bodies that live on NVIDIA's own units, by task kind; chosen before the common ones.

BODIES: their writers. GATES: what opens them in the variant `roles`. SCRATCH: the shared memory
that they need. LOADS: the halves that the loading thread of the variant `matrix` runs. MAPS: the
tensor maps of their operands. Called through the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping

from ark.codegen.dialect import BodyWriter, MapRule, ScratchRule
from ark_cuda.tasks import attention, linear, matmul, wgmma

BODIES: Mapping[str, BodyWriter] = {
    "attention": attention.write,
    "attention_merge": attention.merge,
    "linear": linear.write,
    "matmul": matmul.write,
}
GATES: Mapping[str, BodyWriter] = {
    "attention": attention.gate,
    "attention_merge": attention.merge_gate,
    "linear": linear.gate,
}
LOADS: Mapping[str, BodyWriter] = {"matmul": wgmma.load}
MAPS: Mapping[str, MapRule] = {"matmul": wgmma.maps}
SCRATCH: Mapping[str, ScratchRule] = {
    "attention": attention.scratch,
    "linear": linear.scratch,
    "matmul": matmul.scratch,
}
