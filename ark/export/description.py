"""A plan as constant data in C: the tables that the loop kernel walks, with addresses that name a
segment and an offset, and what a caller may ask for by name. `c/model.h` has the types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.codegen import layout
from ark.errors import UnsupportedError
from ark.ir.dtype import by_name
from ark.ops.tokens import MAX_STOPS
from ark.plan.serialize import machine_of
from ark.plan.types import ITERATION_BARRIER, Plan, PlanTensor
from ark.runtime import tables
from ark.runtime.executor import BUDGET_S

SEGMENT_SHIFT = 48
# As safetensors spells them; other types are bytes there.
CODES = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "int8": "I8",
}
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.+-/ ")


@dataclass(frozen=True)
class Decoder:
    """What the token loop in C knows of a decoder; see ark_decoder in c/model.h."""

    context: int
    chunk: int
    vocabulary: int
    begins: bool
    stops: tuple[int, ...]


def text(value: str) -> str:
    """A C string literal of any text: whatever is not plain is written as octal bytes."""
    parts = (c if c in _PLAIN else "".join(f"\\{b:03o}" for b in c.encode()) for c in value)
    return '"' + "".join(parts) + '"'


def stored(tensor: PlanTensor) -> tuple[str, tuple[int, ...], int]:
    """How a file holds a tensor: the type's code, the shape, the bytes."""
    nbytes = int(np.prod(tensor.items.shape, dtype=np.int64)) * tensor.itemsize
    code = CODES.get(tensor.dtype)
    if code is None or by_name(tensor.dtype).packed:
        return "U8", (nbytes,), nbytes
    return code, tensor.shape, nbytes


def named(plan: Plan) -> list[PlanTensor]:
    """The tensors that are whole buffers and last from one launch to the next, by name once."""
    found: dict[str, PlanTensor] = {}
    for tensor in plan.tensors:
        buffer = plan.buffers[tensor.buffer]
        lasting = buffer.arena in ("parameter", "state", "host", "external")
        if lasting and not tensor.packet and stored(tensor)[2] == buffer.nbytes:
            found.setdefault(tensor.name, tensor)
    return list(found.values())


class _Segments:
    """The pieces of memory by number: the arenas, then each external buffer."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.rows: list[tuple[str, int, int, int]] = []
        self._arenas: dict[str, int] = {}
        self._external: dict[int, int] = {}
        for arena, nbytes in sorted(plan.arenas.items()):
            if nbytes:
                self._arenas[arena] = len(self.rows)
                self.rows.append((arena, nbytes, _cleared(plan, arena, nbytes), 0))
        for buffer in plan.buffers:
            if buffer.arena == "external":
                self._external[buffer.id] = len(self.rows)
                self.rows.append((buffer.name, buffer.nbytes, 0, 1))

    def of(self, number: int) -> tuple[int, int]:
        """A buffer's segment and its offset there."""
        buffer = self._plan.buffers[number]
        if buffer.arena == "external":
            return self._external[number], 0
        return self._arenas[buffer.arena], buffer.offset

    def address(self, number: int) -> int:
        """What tables hold for a buffer's address."""
        segment, offset = self.of(number)
        return (segment + 1 << SEGMENT_SHIFT) + offset


def _cleared(plan: Plan, arena: str, nbytes: int) -> int:
    """Bytes of an arena that are zeroed before a launch: what packets are received in."""
    if arena == "packet":
        return nbytes
    if arena != "symmetric":
        return 0
    received = {t.buffer for t in plan.tensors if t.packet}
    ends = (b.offset + b.nbytes for b in plan.buffers if b.arena == arena and b.id in received)
    return max(ends, default=0)


def check(plan: Plan) -> None:
    """UnsupportedError for plans that need more than one kernel or one rank."""
    if plan.world_size > 1:
        raise UnsupportedError(
            f"the plan is for {plan.world_size} ranks; only plans of one rank can be exported"
        )
    if len(plan.kernels) > 1:
        raise UnsupportedError(
            f"the plan's phases are {len(plan.kernels)} kernels; only plans of one can be "
            "exported; make it with the option variant='block'"
        )


def declarations() -> str:
    """layout.h: the structures that host and kernel share, for C."""
    kinds = [layout.ERROR_KINDS.get(n, "") for n in range(max(layout.ERROR_KINDS) + 1)]
    return "\n".join(
        (
            "// The structures that host and loop kernel share.",
            "#ifndef ARK_LAYOUT_H",
            "#define ARK_LAYOUT_H",
            "#include <assert.h>",
            "#include <stdint.h>",
            "typedef uint32_t ark_u32;",
            "typedef int32_t ark_i32;",
            "typedef uint64_t ark_u64;",
            *(f"typedef struct {struct} {struct};" for struct in layout.STRUCTS),
            layout.declarations().rstrip(),
            f"#define ARK_ERROR_KINDS {len(kinds)}u",
            "static const char* const ark_error_kinds[ARK_ERROR_KINDS] = {",
            *(f"    {text(kind)}," for kind in kinds),
            "};",
            "#endif",
            "",
        )
    )


@dataclass(frozen=True)
class Image:
    """A loop kernel as machine code. made_for: what to say where it cannot be loaded."""

    data: bytes
    made_for: str
    threads: int
    shared_bytes: int


def image_source(image: Image, name: str) -> str:
    """The C source that holds the machine code, as words."""
    padded = image.data + bytes(-len(image.data) % 8)
    words = _words(f"{name}_image", np.frombuffer(padded, np.uint64)).removeprefix("static ")
    declared = f"extern const uint64_t {name}_image[];"
    return f"// The loop kernel: {image.made_for}.\n#include <stdint.h>\n{declared}\n{words}\n"


def describe(
    plan: Plan,
    opcode: Sequence[int],
    name: str,
    decoder: Decoder | None,
    image: Image | None = None,
) -> str:
    """The C source that defines `NAME_model`. opcode: by op, the number of its body. image: the
    loop kernel, where the host's cores do not run it.
    """
    segments, stride = _Segments(plan), machine_of(plan).line_bytes
    counters, lists = (len(segments.rows) + n << SEGMENT_SHIFT for n in (1, 2))
    built = tables.build(
        plan,
        opcode,
        segments.address,
        lambda counter: counters + counter * stride,
        list_address=lists,
    )
    arrays = ("tasks", "counter_ops", "fetches", "growths", "ranges", "lists")
    tensors = named(plan)
    rows, shapes = [], []
    for number, tensor in enumerate(tensors):
        code, shape, nbytes = stored(tensor)
        segment, offset = segments.of(tensor.buffer)
        parameter = int(plan.buffers[tensor.buffer].arena == "parameter")
        shapes.append(f"static const uint64_t shape_{number}[] = {{{_list(shape or (0,))}}};")
        rows.append(
            f"    {{{text(tensor.name)}, {text(code)}, {offset}u, {nbytes}u, shape_{number}, "
            f"{len(shape)}u, {segment}u, {parameter}}},"
        )
    barrier = plan.counters[ITERATION_BARRIER]
    lines = [
        "// A plan as data: its tables, its memory, its names.",
        f'#include "{name}.h"',
        '#include "model.h"',
        f"extern const uint64_t {name}_image[];"
        if image
        else f"int {name}_loop(const struct ArkParams* params, int processors);",
        *(_words(array, getattr(built, array)) for array in arrays),
        "static const ark_segment segments[] = {",
        *(
            f"    {{{text(n)}, {size}u, {clear}u, {ext}, {int(n == 'host' and not ext)}}},"
            for n, size, clear, ext in segments.rows
        ),
        "};",
        *shapes,
        "static const ark_tensor tensors[] = {",
        *(rows or ['    {"", "", 0, 0, 0, 0, 0, 0},']),
        "};",
        "static const char* const op_names[] = {",
        *(f"    {text(op.name)}," for op in plan.ops),
        "};",
        *_decoder(decoder),
        f"const ark_model {name}_model = {{",
        *_kernel(name, image),
        "    .segments = segments,",
        "    .tensors = tensors,",
        "    .op_names = op_names,",
        *(f"    .{array} = {array}," for array in arrays),
        f"    .segment_count = {len(segments.rows)},",
        f"    .tensor_count = {len(tensors)},",
        f"    .op_count = {len(plan.ops)},",
        *(
            f"    .{field} = {len(getattr(built, array))},"
            for field, array in zip(
                ("task_count", "counter_op_count", "fetch_count", "growth_count", "range_count"),
                arrays[:5],
                strict=True,
            )
        ),
        f"    .list_count = {len(built.lists)},",
        f"    .counter_count = {len(plan.counters)},",
        f"    .counter_stride = {stride},",
        f"    .barrier_counter = {ITERATION_BARRIER},",
        f"    .together = {barrier.step},",
        f"    .processors = {plan.processors},",
        f"    .phase_count = {len(plan.phases)},",
        f"    .budget_ns = {int(BUDGET_S * 1e9)}u,",
        f"    .decoder = {'&decoder' if decoder else 0},",
        "};",
        "",
    ]
    return "\n".join(lines)


def _kernel(name: str, image: Image | None) -> list[str]:
    if image is None:
        return [f"    .loop = {name}_loop,"]
    return [
        f"    .image = {name}_image,",
        f"    .made_for = {text(image.made_for)},",
        f"    .threads = {image.threads},",
        f"    .shared_bytes = {image.shared_bytes},",
    ]


def _decoder(decoder: Decoder | None) -> list[str]:
    if decoder is None:
        return []
    stops = (*decoder.stops, *[-1] * (MAX_STOPS - len(decoder.stops)))
    fields = (decoder.context, decoder.chunk, decoder.vocabulary, int(decoder.begins))
    return [
        f"static const int32_t stops[] = {{{_list(stops)}}};",
        f"static const ark_decoder decoder = {{{_list(fields)}, {len(decoder.stops)}, "
        f"{MAX_STOPS}, stops}};",
    ]


def _list(values: Iterable[int]) -> str:
    return ", ".join(str(v) for v in values)


def _words(name: str, array: np.ndarray) -> str:
    """An array's memory as 64-bit words; one word where it is empty."""
    words = [f"{int(w):#x}u" if w else "0" for w in array.view(np.uint64).reshape(-1)] or ["0"]
    lines = (", ".join(words[i : i + 8]) for i in range(0, len(words), 8))
    return f"static const uint64_t {name}[] = {{\n" + "".join(f"    {x},\n" for x in lines) + "};"
