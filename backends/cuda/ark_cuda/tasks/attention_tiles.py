"""Attention of many rows on warpgroups (wgmma), in the variant `matrix`. It supports bf16 and fp16,
and heads of up to 256 elements (multiples of 8). attention_tiles.h has the device code.
attention_units.py computes the other cases by mma.sync. Called by the source writer through the
dialect.
"""

from __future__ import annotations

from ark.backend.codegen.body import BoxMap
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import text
from ark.tasks.attention_tiles import AttentionTilesParams, given, logarithms, shape
from ark_cuda.tasks import attention_units, wgmma
from ark_cuda.tasks.stages import SCRATCH_BYTES

TILE_ROWS = 128
_LAYOUTS = {64: (128, 2), 128: (128, 2), 192: (64, 2), 256: (64, 1)}
"""For each padded number of columns of a head: the number of keys of a block, and the number of
query tiles in shared memory.
"""


def _layout(sig: Signature) -> tuple[int, int, int]:
    """Three sizes: the padded columns of a head, the keys of a block, and the number of query tiles
    that shared memory holds.
    """
    padded = -(-sig.read(AttentionTilesParams).head_dim // 64) * 64
    return (padded, *_LAYOUTS[padded])


def _instructions(sig: Signature) -> str:
    """The definitions of two wgmma instructions. The instruction for the scores reads both operands
    from shared memory. The instruction for the sums over values reads the powers (exponentials of
    the scores) from registers.
    """
    padded, keys, _ = _layout(sig)
    kind, count = wgmma.HALVES[sig.operands[0].dtype], padded // 2
    form = f"m64n{padded}k16.f32.{kind}.{kind}"
    lists = (wgmma.register_list(0, count), wgmma.register_list(count, 4), f"%{count + 4}")
    words = (str(padded), sig.operands[0].ctype, *(f'"{w}"' for w in (form, *lists)))
    held = f"ARK_WGMMA_HELD({', '.join(words)}, {wgmma.sums(count, 'f')})"
    scores = wgmma.multiply(keys, (sig.operands[0], sig.operands[1]), (0, 0))
    return scores + wgmma.once(f"ARK_WGMMA_HELD_{padded}_{kind}", held)


class Warpgroups(attention_units.TileBody):
    """Attention of tiles of queries on warpgroups."""

    def serves(self, sig: Signature, machine: Machine) -> bool:
        params = sig.read(AttentionTilesParams)
        width = params.head_dim
        kinds = {o.dtype for o in sig.operands[:4]}
        return (
            machine.has(Capability.WGMMA)
            and machine.variant.name == "matrix"
            and not params.paged
            and params.rows == TILE_ROWS
            and len(kinds) == 1
            and kinds <= set(wgmma.HALVES)
            and width % 8 == 0
            and width <= 256
            and params.scale > 0.0
            and all(s * 2 % 16 == 0 for i in range(4) for s in sig.operands[i].strides[:-1])
        )

    def maps(self, sig: Signature, machine: Machine) -> tuple[BoxMap, ...]:
        """The tensor maps of queries, keys and values: (columns of a head, ..., batch)."""
        p, (_, keys, _) = sig.read(AttentionTilesParams), _layout(sig)
        width, heads = p.head_dim, p.heads
        query, cache = sig.operands[0], sig.operands[1]
        batch = query.shape[0] if len(query.shape) == 3 else 1
        row, step = query.strides[-2] * 2, (query.strides[0] * 2 if batch > 1 else 16)
        context, kv_heads = cache.shape[-2], p.kv_heads
        steps = [(width, context * width, kv_heads * context * width)] * 2
        if p.by_rows:
            steps = [
                (o.strides[-2], width, o.strides[0] if batch > 1 else width)
                for o in sig.operands[1:3]
            ]
        return (
            BoxMap(
                0,
                query.dtype,
                (width, heads, query.shape[-2], batch),
                (width * 2, row, step),
                (64, 1, TILE_ROWS, 1),
            ),
            *(
                BoxMap(
                    index,
                    cache.dtype,
                    (width, context, kv_heads, batch),
                    tuple(2 * s for s in steps[index - 1]),
                    (64, keys, 1, 1),
                )
                for index in (1, 2)
            ),
        )

    def scratch(self, sig: Signature, machine: Machine) -> int:
        return SCRATCH_BYTES

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the function that the computing warps run."""
        padded, keys, held = _layout(sig)
        products = f"ArkAttentionProducts<{sig.operands[0].ctype}, {padded}, {keys}>"
        scale, cap, _, _, _, *others = given(sig)
        late = (f"[](const ArkTask& t) {{ return {operand}; }}" for operand in logarithms(sig))
        arguments = (scale, cap, *others, *late)
        call = text.called(
            "ark_attention_warpgroups", (shape(sig), products, padded, keys, held), arguments
        )
        # The body is inlined into the loop, because in a called function the compiler would wait
        # for each wgmma before it starts the next.
        body = f"ARK_DEVICE void {name}(ArkCtx& c, const ArkTask& t) {{\n  {call};\n}}\n"
        return _instructions(sig) + body

    def load(self, name: str, sig: Signature, machine: Machine) -> str:
        """The source of the function with which the loading thread loads queries, keys and
        values.
        """
        padded, keys, held = _layout(sig)
        first = len(sig.operands)
        addresses = ", ".join(f"t.operand[{first + i}]" for i in range(3))
        constants = ", ".join(str(v) for v in (shape(sig), padded, keys, held))
        return (
            f"ARK_DEVICE void {name}_load(ArkCtx& c, const ArkTask& t, ArkMatrixLoad& load) {{\n"
            f"  ark_attention_load<{constants}>(c, t, load, {addresses}, {given(sig)[6]});\n}}\n"
        )
