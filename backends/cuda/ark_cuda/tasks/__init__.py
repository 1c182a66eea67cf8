"""Task bodies that live on NVIDIA's own units, by task kind; chosen before the common ones.

BODIES: their writers. GATES: what opens them in the variant `roles`. SCRATCH: the shared memory
that they need. Called through the dialect.
"""

from __future__ import annotations

from collections.abc import Mapping

from ark.codegen.dialect import BodyWriter, ScratchRule
from ark_cuda.tasks import attention, linear, matmul

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
SCRATCH: Mapping[str, ScratchRule] = {
    "attention": attention.scratch,
    "linear": linear.scratch,
    "matmul": matmul.scratch,
}
