"""Whether the shared memory beside the ring suffices for the ops of a phase that decodes. The ring
is the part of shared memory through which weights are streamed. Called by ark.lower.choose, which
chooses a kernel variant; variants differ in the size of their ring.
"""

from __future__ import annotations

from collections.abc import Sequence

from ark.ir.attributes import AttentionAttributes
from ark.ir.dtype import RowType
from ark.ir.graph import Node
from ark.lower.tiling import input_in_memory, stage_tile
from ark.machine import Machine
from ark.tasks.attention import in_place_bytes
from ark.tasks.linear_form import (
    MAX_UNIT_INPUT_ROWS,
    narrow_bytes,
    row_input_bytes,
    sums_bytes,
)

MAX_ROW_SUM_BYTES = 1024  # shared memory for the sums of a layer of one row; reserved in any case


def fits_beside_ring(nodes: Sequence[Node], machine: Machine, otherwise: Machine) -> bool:
    """True if the shared memory that the ring leaves free is large enough for the inputs and sums
    of every linear layer of few rows, and for attention whose positions are divided among tasks.
    otherwise: the machine with the kernel variant that is used if no variant has enough; attention
    that has not enough there either is not divided, and needs no such memory.
    """
    layers = [
        n for n in nodes if n.type == "linear" and n.inputs[0].shape[0] <= MAX_UNIT_INPUT_ROWS
    ]
    held = [_layer_bytes(n, machine) + MAX_ROW_SUM_BYTES for n in layers]
    attended = [divided_bytes(n) for n in nodes if n.type in ("attention", "paged_attention")]
    held += [size for size in attended if size <= beside_ring(otherwise)]
    return max(held, default=0) <= beside_ring(machine)


def beside_ring(machine: Machine) -> int:
    """Bytes of shared memory that the ring leaves free."""
    return machine.shared_bytes - machine.ring_bytes


def _layer_bytes(node: Node, machine: Machine) -> int:
    """Bytes of shared memory that a linear layer of few rows needs for its inputs and, if it has
    several rows, for their sums. The sums of a single row are not counted here, because
    MAX_ROW_SUM_BYTES is reserved for them.
    """
    (rows, k), dtype = node.inputs[0].shape, node.inputs[1].dtype
    if isinstance(dtype, RowType):
        return row_input_bytes(dtype)  # bytes of one row
    if rows == 1:
        return narrow_bytes(1, k, dtype.itemsize)
    held, splits = stage_tile(node, machine)
    input_bytes = 0 if input_in_memory(node) else narrow_bytes(rows, k, dtype.itemsize)
    return input_bytes + sums_bytes(machine.warps, rows, held, splits)


def divided_bytes(node: Node) -> int:
    """Bytes of shared memory that attention of few rows needs for its queries and scores if its
    positions are divided among tasks; 0 for attention that is always divided into tiles of queries.
    """
    how, key = node.read(AttentionAttributes), node.inputs[1]
    if not how.split:
        return 0
    if node.type == "paged_attention":
        kv_heads = key.shape[1]
    else:
        kv_heads = key.shape[0] // node.inputs[3].shape[0]  # the caches of all sequences
    return in_place_bytes(how.heads // kv_heads, how.head_dim)
