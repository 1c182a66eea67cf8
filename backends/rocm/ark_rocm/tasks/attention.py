"""Attention of one row over a KV cache of 16-bit elements that is read in place.

Used in decoding, for heads of 32, 64 or 128 elements and caches that were written before the
iteration, except for the newest row (such caches are on the operand stream). The body begins before
its task's waits (Body.enters). The vendor-independent body computes all other cases. attention.h
has the device code. Called by the source writer through the dialect.
"""

from __future__ import annotations

from math import gcd

from ark.backend.codegen.body import Body
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan import kind as kinds
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention import NEW_ROWS_OPERAND, AttentionParams
from ark.tasks.attention_tiles import AttentionTilesParams, context_of, given, shape
from ark_rocm.tasks.headers import read

MAX_LOADS_IN_FLIGHT = 4  # loads of keys that a wave has in flight, and as many of values
MOST_HEADS = 8  # query heads of a key, whose sums a lane keeps in registers
_WIDTHS = (32, 64, 128)


def _group(sig: Signature) -> int:
    return sig.read(AttentionParams).group


def _teams(sig: Signature, machine: Machine) -> int:
    """The number of teams of waves. Each team computes some of the positions for all query heads of
    a key head. Within a team, each wave computes different heads.
    """
    return machine.warps // gcd(_group(sig), machine.warps)


def _bytes(sig: Signature, machine: Machine) -> int:
    width, group = sig.read(AttentionParams).head_dim, _group(sig)
    halves = _teams(sig, machine) * machine.lanes // 32
    return 4 * (halves * group * (width + 2) + (group + 2) * width)


def _ahead(sig: Signature, machine: Machine) -> int:
    """The number of loads of keys that a wave keeps in flight. It is at most the number that a full
    cache needs, because a wave also computes scores of loads beyond the end of the cache.
    """
    p, cache = sig.read(AttentionParams), sig.operands[1]
    positions = _teams(sig, machine) * machine.lanes * 16 // (p.head_dim * cache.itemsize)
    rounds: int = cache.shape[1] // p.splits // positions
    return max(1, min(rounds, MAX_LOADS_IN_FLIGHT))


class OneRow(Body):
    """Attention of one query row over a cache that is read in place."""

    kind = "attention"
    enters = True

    def serves(self, sig: Signature, machine: Machine) -> bool:
        params = sig.read(AttentionParams)
        return (
            machine.variant.name == "block"
            and machine.lanes >= 32  # the sums are over half waves
            and params.streamed > 0
            and params.window == 0
            and params.head_dim in _WIDTHS
            and sig.operands[1].dtype in ("bf16", "fp16")
            and _group(sig) <= MOST_HEADS
            and _bytes(sig, machine) <= machine.shared_bytes
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("lines.h", "ask.h", "prefetch.h", "attention_sums.h", "attention.h")
        return read(*names)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the waves' results, and for the inputs that the current
        iteration writes (the queries and the newest key and value).
        """
        return _bytes(sig, machine)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p, cache = sig.read(AttentionParams), sig.operands[1]
        ahead = _ahead(sig, machine)
        sizes = (p.group, p.kv_heads, p.shares, p.head_dim, cache.shape[1], p.splits, ahead)
        operands = [text.given(sig, i, const=i != 4) for i in range(NEW_ROWS_OPERAND + 1)]
        kind = f"static_cast<const {cache.ctype}*>(nullptr)"
        arguments = (kind, text.literal(p.scale), *operands)
        call = text.called("ark_row_attention", sizes, arguments)
        return f"ARK_BODY bool {name}(ArkCtx& c, const ArkTask& t) {{\n  return {call};\n}}\n"


class OneRowTiles(Body):
    """The task kind attention_tiles for tiles of one query row, over a cache that is read in place.
    The planner uses it for attention with a window, or over few positions.
    """

    kind = "attention_tiles"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        params, (query, key, value) = sig.read(AttentionTilesParams), sig.operands[:3]
        return (
            machine.variant.name == "block"
            and machine.lanes >= 32  # the sums are over half waves
            and query.shape[-2] == params.rows == 1
            and params.head_dim in _WIDTHS
            and not (params.by_rows or params.paged or params.mask or params.strict)
            and not params.logarithms
            and key.dtype == value.dtype
            and key.dtype in ("bf16", "fp16")
            and all(o.aligned and o.strides[-1] == 1 for o in (key, value))
            and all(s % 8 == 0 for o in (key, value) for s in o.strides[:-1])
        )

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("attention_sums.h", "attention_row.h")
        own = read(*names)
        return (*map(text.header, ("pages.h", "attention_tiles.h")), *own)

    def scratch(self, sig: Signature, machine: Machine) -> int:
        parts = machine.warps * machine.lanes // 32
        return 4 * parts * (sig.read(AttentionTilesParams).head_dim + 2)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        p, cache = sig.read(AttentionTilesParams), sig.operands[1]
        step = machine.warps * machine.lanes * 16 // (p.head_dim * cache.itemsize)
        seen = min(context_of(sig), p.window or context_of(sig))
        ahead = min(-(-seen // step), MAX_LOADS_IN_FLIGHT)
        arguments = (f"static_cast<const {cache.ctype}*>(nullptr)", *given(sig)[:-1])
        call = text.called("ark_attention_one", (shape(sig), ahead), arguments)
        return text.function(name, f"  {call};\n")


class Merge(Body):
    """The vendor-independent body that merges the partial results of attention's splits, with AMD
    code for the wait for these results.
    """

    kind = "attention_merge"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return machine.has(Capability.MFMA) and machine.variant.name == "block"

    def headers(self, machine: Machine) -> tuple[str, ...]:
        names = ("lines.h", "ask.h", "merge.h")
        return read(*names)

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return kinds.get("attention_merge").source(name, sig, machine)
