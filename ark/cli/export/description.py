"""Writes a plan as constant data in C. The data are the tables that the loop kernel reads (tasks,
waits and signals, fetches), and a list of the tensors that a caller can access by name. Addresses
are not known yet, so an address is written as the number of a memory segment and an offset in the
segment. `c/model.h` has the types. Called by ark.cli.export.write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ark.backend.codegen import layout
from ark.backend.codegen.body import BoxMap
from ark.errors import UnsupportedError
from ark.ir.dtype import by_name
from ark.ops.tokens import MAX_STOPS
from ark.plan.serialize import machine_of
from ark.plan.types import ITERATION_BARRIER, Plan, PlanTensor
from ark.runtime import tables
from ark.runtime.executor import BUDGET_S

SEGMENT_SHIFT = 48
# Types that safetensors has a name for. Tensors of other types are stored as bytes.
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
    """The properties of a decoder that the token loop in C needs; see ark_decoder in c/model.h."""

    context: int
    chunk: int
    vocabulary: int
    begins: bool
    stops: tuple[int, ...]


def text(value: str) -> str:
    """The text as a C string literal; special characters are written as octal bytes."""
    parts = (c if c in _PLAIN else "".join(f"\\{b:03o}" for b in c.encode()) for c in value)
    return '"' + "".join(parts) + '"'


def stored(tensor: PlanTensor) -> tuple[str, tuple[int, ...], int]:
    """A tensor's type code, shape and number of bytes in a safetensors file."""
    nbytes = int(np.prod(tensor.items.shape, dtype=np.int64)) * tensor.itemsize
    code = CODES.get(tensor.dtype)
    if code is None or by_name(tensor.dtype).packed:
        return "U8", (nbytes,), nbytes
    return code, tensor.shape, nbytes


def named(plan: Plan) -> list[PlanTensor]:
    """The tensors that a caller can access by name, one for each name: those that cover a whole
    buffer and keep their contents between launches.
    """
    by_name: dict[str, PlanTensor] = {}
    for tensor in plan.tensors:
        buffer = plan.buffers[tensor.buffer]
        lasting = buffer.arena in ("parameter", "state", "host", "external")
        if lasting and not tensor.packet and stored(tensor)[2] == buffer.nbytes:
            by_name.setdefault(tensor.name, tensor)
    return list(by_name.values())


class _Segments:
    """Numbers the segments of memory. The first segments are the plan's arenas, which are
    allocations by purpose (activations, parameters, state, ...). Then each external buffer is a
    segment.
    """

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
        """The number of the memory segment in which a buffer is, and the buffer's offset in the
        segment.
        """
        buffer = self._plan.buffers[number]
        if buffer.arena == "external":
            return self._external[number], 0
        return self._arenas[buffer.arena], buffer.offset

    def address(self, number: int) -> int:
        """A buffer's address in the form in which tables store it: (segment + 1) << SEGMENT_SHIFT,
        plus the offset.
        """
        segment, offset = self.of(number)
        return (segment + 1 << SEGMENT_SHIFT) + offset


def _cleared(plan: Plan, arena: str, nbytes: int) -> int:
    """The bytes at the beginning of an arena that must be zeroed before a launch, because they hold
    packet buffers.
    """
    if arena == "packet":
        return nbytes
    if arena != "symmetric":
        return 0
    received = {t.buffer for t in plan.tensors if t.packet}
    ends = (b.offset + b.nbytes for b in plan.buffers if b.arena == arena and b.id in received)
    return max(ends, default=0)


def check(plan: Plan) -> None:
    """Raises UnsupportedError if the plan is for more than one rank."""
    if plan.world_size > 1:
        raise UnsupportedError(
            f"the plan is for {plan.world_size} ranks; only plans of one rank can be "
            "exported; plan for one rank"
        )


def declarations() -> str:
    """The text of layout.h, with the structures in C that host and kernel share."""
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
            layout.structures().rstrip(),
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
    """A loop kernel in the form of machine code."""

    data: bytes
    threads: int
    shared_bytes: int


def numbered(name: str, number: int) -> str:
    """The name of the model's kernel with this number. The name of the first kernel has no
    number.
    """
    return f"{name}_{number}" if number else name


def image_source(images: Sequence[Image], name: str) -> str:
    """C source that holds the kernels' machine code as arrays of words."""
    lines = ["// The loop kernels, as machine code.", "#include <stdint.h>"]
    for number, image in enumerate(images):
        array = numbered(f"{name}_image", number)
        padded = image.data + bytes(-len(image.data) % 8)
        lines.append(f"extern const uint64_t {array}[];")
        lines.append(_words(array, np.frombuffer(padded, np.uint64)).removeprefix("static "))
    return "\n".join([*lines, ""])


def describe(
    plan: Plan,
    opcode: Sequence[int],
    name: str,
    decoder: Decoder | None,
    images: Sequence[Image] = (),
    maps: Sequence[Sequence[BoxMap]] = (),
    made_for: str = "",
) -> str:
    """The C source that defines `NAME_model`. opcode: for each op, the number of its body (device
    function). maps: for each op, its box maps (descriptors with which hardware copies boxes of
    memory). images: the machine code of the loop kernels; empty if the kernels are host code.
    made_for: the error message if a device cannot load an image.
    """
    segments, stride = _Segments(plan), machine_of(plan).line_bytes
    counters, lists, mapped = (len(segments.rows) + n << SEGMENT_SHIFT for n in (1, 2, 3))
    first = [0, *itertools.accumulate(len(op_maps) for op_maps in maps)]
    built = tables.build(
        plan,
        opcode,
        segments.address,
        lambda counter: counters + counter * stride,
        maps,
        lambda op, place: mapped + (first[op] + place) * layout.MAP_BYTES,
        lists,
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
        *(f"extern const uint64_t {numbered(f'{name}_image', k)}[];" for k in range(len(images))),
        *([] if images else [f"int {name}_loop(const struct ArkParams*, int, void (*)(void));"]),
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
        *_kernels(plan, name, images),
        *_maps(plan, maps, segments),
        f"const ark_model {name}_model = {{",
        "    .kernels = kernels,",
        "    .maps = maps,",
        f"    .kernel_count = {len(plan.kernels)},",
        f"    .map_count = {first[-1]},",
        f"    .made_for = {text(made_for)},",
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
        f"    .barrier_step = {barrier.step},",
        f"    .processors = {plan.processors},",
        f"    .phase_count = {len(plan.phases)},",
        f"    .budget_ns = {int(BUDGET_S * 1e9)}u,",
        f"    .decoder = {'&decoder' if decoder else 0},",
        "};",
        "",
    ]
    return "\n".join(lines)


def _kernels(plan: Plan, name: str, images: Sequence[Image]) -> list[str]:
    rows = [f"    {{{name}_loop, 0, 0, 0, {len(plan.phases) - 1}u}},"]
    if images:
        rows = [
            f"    {{0, {numbered(f'{name}_image', k)}, {image.threads}u, {image.shared_bytes}u, "
            f"{phases[-1]}u}},"
            for k, (image, phases) in enumerate(zip(images, plan.kernels, strict=True))
        ]
    return ["static const ark_kernel kernels[] = {", *rows, "};"]


def _maps(plan: Plan, maps: Sequence[Sequence[BoxMap]], segments: _Segments) -> list[str]:
    rows = []
    for op, op_maps in zip(plan.ops, maps, strict=bool(maps)):
        for box in op_maps:
            tensor = plan.tensors[op.operands[box.operand]]
            address = segments.address(tensor.buffer) + tensor.first_byte
            rows.append(
                f"    {{{address:#x}u, {text(box.dtype)}, {len(box.dims)}u, {{{_list(box.dims)}}}, "
                f"{{{_list(box.strides)}}}, {{{_list(box.box)}}}, {{{_list(box.lower or [0])}}}, "
                f"{{{_list(box.upper or [0])}}}, {{{_list(box.steps or [0])}}}, {box.fetched}u}},"
            )
    empty = '    {0, "", 0, {0}, {0}, {0}, {0}, {0}, {0}, 0},'
    return ["static const ark_box_map maps[] = {", *(rows or [empty]), "};"]


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
    """C source with an array's memory as 64-bit words. An empty array gets one word."""
    words = [f"{int(w):#x}u" if w else "0" for w in array.view(np.uint64).reshape(-1)] or ["0"]
    lines = (", ".join(words[i : i + 8]) for i in range(0, len(words), 8))
    return f"static const uint64_t {name}[] = {{\n" + "".join(f"    {x},\n" for x in lines) + "};"
