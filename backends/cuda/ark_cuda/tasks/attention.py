"""Attention over the KV cache that loads keys and values before the queries are ready.

It supports the common kind's signatures if the number of 16-byte pieces in a head's row is a power
of two. A group of lanes reads a row of the cache, 16 bytes per lane. Only the newest key and value
are written in the current iteration, so every warp loads its first cache rows before the task reads
its queries. Each warp keeps a running softmax of its rows (Milakov and Gimelshein 2018), and the
warps' partial results are combined at the end (flash-decoding, Dao et al. 2023). Called by the
source writer through the dialect.
"""

from __future__ import annotations

from typing import ClassVar

from ark.backend.codegen.body import Body
from ark.errors import PlanError
from ark.machine import Machine
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention import (
    NEW_ROWS_OPERAND,
    AttentionMergeParams,
    AttentionParams,
    merged,
    staged_bytes,
    staged_warps,
)
from ark.tasks.paged import PAGED_FRESH
from ark_cuda.tasks import attention_boxed, inline
from ark_cuda.tasks.stages import SCRATCH_BYTES

STAGED = ("mma.h", "attention_staged.h", "attention_stream.h")  # headers
BOXED = ("mma.h", "attention_staged.h", "attention_boxed_sums.h", "attention_boxed.h")
MAX_STAGE_POSITIONS = 64  # the most positions of a stage; a warp's registers hold their scores
MAX_GROUP_HEADS = 8  # the most query heads of a key/value head; registers hold their sums


def _shape(sig: Signature) -> tuple[int, int]:
    """The number of query heads per key/value head, and the number of elements of a head."""
    p = sig.read(AttentionParams)
    return p.heads // int(p.kv_heads), p.head_dim


def _bytes(sig: Signature, warps: int) -> int:
    group, width = _shape(sig)
    return 4 * ((group + 2) * width + warps * group * (width + 2))


def _warps(sig: Signature, machine: Machine) -> int:
    """The number of warps whose partial results fit in shared memory. 0 if the body that reads
    caches in place does not support the signature.
    """
    group, width = _shape(sig)
    if (
        sig.operands[1].dtype not in ("fp32", "fp16", "bf16")
        or sig.read(AttentionParams).shares > 1
    ):
        return 0
    piece = 16 // sig.operands[1].itemsize
    lanes, rest = divmod(width, piece)
    if rest or lanes not in (1, 2, 4, 8, 16, 32) or group > MAX_GROUP_HEADS:
        return 0
    warps = machine.warps
    while warps and _bytes(sig, warps) > machine.task_bytes:
        warps //= 2
    return warps


def _staged(sig: Signature, machine: Machine) -> int:
    """The number of cache positions in a stage of the operand ring. 0 if the task reads the caches
    in place. Raises PlanError if the plan uses the ring but no body here reads such stages.
    """
    rows = sig.read(AttentionParams).streamed if machine.ring_bytes else 0
    group, width = _shape(sig)
    taken = (
        inline.leads(machine)
        and rows % 8 == 0
        and rows <= MAX_STAGE_POSITIONS
        and group <= MAX_GROUP_HEADS
        and sig.read(AttentionParams).shares == 1
        and width in (32, 64, 128)
        and sig.operands[1].dtype in ("fp16", "bf16")
        and staged_warps(group, width, machine) > 0
    )
    if rows and not taken:
        raise PlanError(
            f"the plan's attention reads {rows} cache positions per stage of the operand ring, for "
            f"{group} query heads of {width} elements ({sig.operands[1].dtype}); this backend "
            f"supports it under the variant roles, for a multiple of 8 up to {MAX_STAGE_POSITIONS} "
            f"positions, at most {MAX_GROUP_HEADS} query heads, and 32, 64 or 128 elements "
            "(fp16, bf16)"
        )
    return rows


def _call(sig: Signature, callee: str, more: tuple[int, ...], staged: bool) -> str:
    """The call of a device function of attention. more: its last sizes. staged: True if a loading
    warp copies keys and values to the ring, so that the function does not read the caches.
    """
    (group, width), cache = _shape(sig), sig.operands[1]
    p, sizes = sig.read(AttentionParams), cache.shape[1:2]
    out, last = 4, NEW_ROWS_OPERAND
    ring: tuple[int, ...] = (0, 3, 4, NEW_ROWS_OPERAND)
    if sig.kind == "paged_attention":
        pool, _, page, _ = cache.shape
        sizes = (page, pool, sig.operands[3].shape[-1])
        out, last, ring = 5, PAGED_FRESH, (0, 1, 3, 4, 5, PAGED_FRESH)
    typed = (cache.ctype,) if staged else ()
    operands = [text.given(sig, i, const=i != out) for i in (ring if staged else range(last + 1))]
    constants = (*typed, group, p.kv_heads, width, *sizes, p.splits, *more)
    return text.called(callee, constants, (text.literal(p.scale), *operands))


class _Cached(Body):
    """The base class of the attention bodies. They share headers and, except for Merge, the lead
    warp's wait for the task's input. callee: the device function. own: further headers. paged: the
    header for caches in pages.
    """

    kind = "attention"
    callee: ClassVar[str] = ""
    own: ClassVar[tuple[str, ...]] = ()
    paged: ClassVar[str] = ""

    def headers(self, machine: Machine) -> tuple[str, ...]:
        staged = STAGED if inline.leads(machine) else ()
        names = ("packets.h", "attention.h", *staged, *self.own)
        pages = (text.header("pages.h"), inline.header(self.paged)) if self.paged else ()
        return (*map(inline.header, names), *pages)

    def window(self, sig: Signature) -> tuple[int, ...]:
        """The template constant for the window; none for caches in pages, which have no windows."""
        return () if self.paged else (sig.read(AttentionParams).window,)

    def poll(self, name: str, sig: Signature, machine: Machine) -> str | None:
        """The source by which the communicating warp waits for the task's input. The wait ends when
        the last query of the task's heads has arrived.
        """
        group, width = _shape(sig)
        call = text.called("ark_attention_poll", (group * width,), (text.given(sig, 0),))
        return inline.poll(name, call)


class FromRing(_Cached):
    """Attention of one query row, whose keys and values a loading warp copies to the ring of stages
    in shared memory.
    """

    callee = "ark_attention_staged"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return _staged(sig, machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return staged_bytes(*_shape(sig), staged_warps(*_shape(sig), machine))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        more = (_staged(sig, machine), staged_warps(*_shape(sig), machine))
        call = _call(sig, self.callee, (*more, *self.window(sig)), staged=True)
        return inline.inlined(name, call, machine)


class PagesFromRing(FromRing):
    """The same over a paged cache."""

    kind = "paged_attention"
    callee, paged = "ark_attention_staged_pages", "attention_stream_pages.h"


class Boxed(_Cached):
    """Attention of one row in the variant `matrix`, where the loading thread copies keys and values
    to the ring of stages in shared memory (attention_boxed.py). numbers: of the operands query,
    position, output and fresh.
    """

    callee, own = "ark_attention_boxed", BOXED
    numbers: ClassVar[tuple[int, ...]] = (0, 3, 4, NEW_ROWS_OPERAND)

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return attention_boxed.rows(sig, machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return SCRATCH_BYTES

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return inline.inlined(name, _call(sig, self.callee, self.numbers, staged=True), machine)

    def load(self, name: str, sig: Signature, machine: Machine) -> str | None:
        stages = f"ArkBoxedStages<{sig.operands[1].ctype}, {_shape(sig)[1]}>"
        return (
            f"ARK_DEVICE void {name}_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {{\n"
            f"  ark_matrix_load_grown<{stages}>(c, t, load);\n}}\n"
        )


class BoxedPages(Boxed):
    """The same over a paged cache."""

    kind = "paged_attention"
    callee, paged = "ark_attention_boxed_pages", "attention_boxed_pages.h"
    numbers = (0, 4, 5, PAGED_FRESH)


class InPlace(_Cached):
    """Attention whose caches are read in place. A warp reads its first cache rows before the
    queries.
    """

    callee = "ark_attention_warps"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return not _staged(sig, machine) and _warps(sig, machine) > 0

    def scratch(self, sig: Signature, machine: Machine) -> int:
        """Bytes of shared memory for the queries, the newest key and value, and each warp's partial
        result.
        """
        return _bytes(sig, _warps(sig, machine))

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        more = (_warps(sig, machine), *self.window(sig))
        call = _call(sig, self.callee, more, staged=False)
        # For decoding, where the time of one token matters, the body is inlined into the loop; for
        # prompts it is a called function.
        return inline.inlined(name, call, machine, often=sig.operands[0].shape[0] == 1)


class Paged(InPlace):
    """The same over a paged cache."""

    kind = "paged_attention"
    callee, paged = "ark_attention_pages", "attention_pages.h"


class Merge(_Cached):
    """Merges the partial results of a head's splits (task kind `attention_merge`). It is the
    vendor-independent body, inlined into the loop, in which the lanes of a warp load packets at the
    same time.
    """

    kind = "attention_merge"

    def serves(self, sig: Signature, machine: Machine) -> bool:
        return True

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(AttentionMergeParams)
        constants = (params.head_dim, params.splits, params.group)
        call = text.called("ark_attention_merge", constants, merged(sig))
        return inline.inlined(name, call, machine, enters=False)

    def poll(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source by which the communicating warp waits for the task's input. The wait ends when
        one of the partial results that the task combines has arrived.
        """
        constants, operands = (sig.read(AttentionMergeParams).splits,), (text.given(sig, 0),)
        return inline.poll(name, text.called("ark_attention_merge_poll", constants, operands))
