"""Attention of one row in the variant `matrix`, whose keys and values come through the ring of the
loading thread (attention_boxed.h).

It supports the signatures of plans that stream keys and values, for a number of query heads whose
partial results fit in front of the stages. Called by ark_cuda.tasks.attention and, for the size of
the ring, by ark_cuda.tasks.matrix_ring.
"""

from __future__ import annotations

from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks.attention import AttentionParams
from ark_cuda.tasks.code_products import STAGE_ALIGNMENT_BYTES
from ark_cuda.tasks.stages import SLABS_BYTES

KINDS = ("attention", "paged_attention")
MAX_GROUP_HEADS = 8  # the most query heads of a key/value head: matrix units take them at once
MAX_SHARING_WARPS = 4  # the most warps that share a stage
PRODUCT_POSITIONS = 8  # positions that one matrix instruction multiplies
GAP_BYTES = 4 * 64  # of a stage: ARK_BOXED_SKEW behind each half of the keys and of the values
MAX_PARTS = 4  # the most partial results in shared memory if two warps share one


def rows(sig: Signature, machine: Machine) -> int:
    """The number of cache positions in a stage; 0 if this body does not support the signature."""
    if sig.kind not in KINDS or machine.variant.name != "matrix":
        return 0
    if not machine.has(Capability.WGMMA):  # with tensor memory, the hardware alone frees stages
        return 0
    p, cache = sig.read(AttentionParams), sig.operands[1]
    taken = (
        p.streamed > 0
        and p.shares == 1
        and p.window == 0
        and p.streamed % (MAX_SHARING_WARPS * PRODUCT_POSITIONS) == 0
        and p.heads // p.kv_heads <= MAX_GROUP_HEADS
        and p.head_dim in (32, 64, 128)
        and cache.dtype in ("fp16", "bf16")
    )
    return p.streamed if taken and _nbytes(sig) <= SLABS_BYTES else 0


def _nbytes(sig: Signature) -> int:
    """Bytes of ArkBoxedAttention if two warps share a partial result."""
    p = sig.read(AttentionParams)
    group, width = p.heads // p.kv_heads, p.head_dim
    return 4 * ((group + 2) * width + MAX_PARTS * group * (width + 4))


def stage(sig: Signature, machine: Machine) -> int:
    """Bytes of a stage, which has keys and values; 0 if this body does not support the
    signature. The gaps take the place of some of the `rows` positions, but each of the warps that
    share the stage has positions.
    """
    count = rows(sig, machine)
    if not count:
        return 0
    position = 2 * sig.read(AttentionParams).head_dim * sig.operands[1].itemsize
    least = position * MAX_SHARING_WARPS * PRODUCT_POSITIONS + GAP_BYTES
    return max(count * position, -(-least // STAGE_ALIGNMENT_BYTES) * STAGE_ALIGNMENT_BYTES)
