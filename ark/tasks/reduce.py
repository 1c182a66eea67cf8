"""The task kind `reduce`: sum, mean, max, min or prod over one dimension, or the sum of squared
differences from the mean (squares), or the logarithm of the sum of exponentials that log_softmax
subtracts (logsumexp). Emitted by ark.lower.ops.reductions.

params: function, axis (of 4 dimensions, or of all if there are more), count (the elements of a
mean), tile (4 sizes of the output, 1 along the axis; more are folded, ark.ir.fold), term (an
expression of ark.tasks.expression, whose values are reduced). `moments` gives an int64 with mean
and sum of squares of a part of the elements; `squares` also reads the moments of all parts, and
`mean_of_moments` reads them only. `sums` gives an int64 with two sums of a part: of the elements,
and of the terms; `first_sum` and `second_sum` read those of all parts.

operands: input, output. With a term: one input, or two of one shape, then inputs of size 1 along
the axis, which broadcast to the output, then the output.

coord: the tile's first index in the output. reduce.h has the device code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from ark.ir.fold import MAX_FOLDED_DIMS, fold
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import (
    FLOAT_NAMES,
    INTEGER_NAMES,
    Dim,
    Params,
    Places,
    Size,
    Tile,
    box,
    count,
    covers,
    need,
    shaped,
    typed,
)
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, tile_type
from ark.tasks.elementwise import HEADERS, broadcast_access, broadcasts, tile_box
from ark.tasks.reduce_functions import (
    ELEMENTS,
    FOLDS,
    MOMENTS,
    RESULTS,
    STRUCT_BYTES,
    SUMS,
    stored_text,
)

MAX_VECTOR_SUMS = 64  # sums of a thread that runs alone, for vectorisation
_UNUSED = "(void)i0; (void)i1; (void)i2; "
BLOCK_COLUMNS = 64  # neighbouring results that a block reduces at once, if a column is reduced
LOADS_PER_BARRIER_PAIR = 16  # loads of a thread that take as long as two barriers
# The number of elements of a column that one thread adds up, if tiles are wide enough.
COLUMN_ELEMENTS_PER_THREAD = 64
# Bytes and vectors in flight per thread. A thread has more vectors in flight if they are narrow, so
# that their bytes stay the same.
BYTES_IN_FLIGHT, MIN_IN_FLIGHT, MAX_IN_FLIGHT = 64, 4, 16
# A row of at most MAX_SHORT_ROW_VECTORS vectors per lane of a warp is reduced by some of the warp's
# lanes, with at most MAX_VECTORS_PER_LANE vectors per lane.
MAX_SHORT_ROW_VECTORS, MAX_VECTORS_PER_LANE = 2, 4
SECTOR_BYTES = 32  # neighbouring bytes that one access loads at least
SHORT_WORDS_IN_FLIGHT = 32  # 32-bit words of short rows that a thread has in flight


MAX_FULL_TERM_INPUTS = 2  # inputs of a term with all elements along the axis


def _compute(sig: Signature) -> str:
    """The C type in which a reduction combines elements."""
    dtypes = [o.dtype for o in sig.operands[:-1]]
    term = sig.read(ReduceParams).term
    rank = len(sig.operands[0].shape)
    return expression.check(term, dtypes, rank) if term else expression.value_type(dtypes[0])


def _total(sig: Signature) -> str:
    """The C type of combined elements."""
    params, elements = sig.read(ReduceParams), _compute(sig)
    if params.function in SUMS:
        return "ArkSums"
    if params.function not in MOMENTS:
        return "ArkExpSum" if params.function == "logsumexp" else elements
    words = text.pad4(sig.operands[0].shape, 1)[params.axis]
    return f"ArkMoments<{params.count // words if elements == 'ark_i64' else 1}>"


def _total_bytes(sig: Signature) -> int:
    """Bytes of combined elements."""
    plain = 8 if _compute(sig) == "ark_i64" else 4
    return STRUCT_BYTES.get(sig.read(ReduceParams).function, plain)


def team_of(rows: int, machine: Machine) -> int:
    """The number of warps that reduce a row together. rows: the number of rows of the task."""
    if rows >= machine.warps or not machine.cooperative:
        return 1
    teams = [1, machine.warps]
    if machine.has(Capability.NAMED_BARRIERS):
        teams += [t for t in (2, 4, 8) if machine.warps % t == 0]
    elif 2 * rows < machine.warps:
        return machine.warps
    return max(t for t in teams if t * rows <= machine.warps)


def _deep(sig: Signature) -> range:
    """The indices of the inputs that vary along the reduced axis."""
    deep = [o.shape for o in sig.operands[:-1]].count(sig.operands[0].shape)
    return range(deep)


class ReduceParams(Params, frozen=True):
    function: Literal[tuple(FOLDS)]  # type: ignore[valid-type]
    axis: Dim
    count: Size
    tile: Tile
    term: list[Any] | None = None


class Reduce(TaskKind):
    name = "reduce"
    params = ReduceParams
    headers = (*HEADERS, *text.headers("folds.h", "moments.h", "reduce.h"))

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ReduceParams)
        term, out = params.term, len(sig.operands) - 1
        if term is None:
            count(sig, 2)
        need(out > 0, "the output operand is missing")
        mean = params.function == "mean"
        whole = INTEGER_NAMES if term is not None or not mean else ()
        source = typed(sig, 0, *FLOAT_NAMES, *whole)
        axis = params.axis - max(4, len(source.shape)) + len(source.shape)
        need(
            0 <= axis < len(source.shape),
            f"axis {params.axis} is out of range for {list(source.shape)}",
        )
        shape = (*source.shape[:axis], 1, *source.shape[axis + 1 :])
        kind = _compute(sig)
        need(
            kind != "bool" and not (mean and kind != "float"),
            f"function {params.function} does not support {kind}",
        )
        given = ELEMENTS.get(params.function, (kind,))
        need(kind in given, f"function {params.function} does not support {kind}")
        need(term is not None or params.function != "sums", "two sums need a term")
        result = RESULTS.get(params.function, kind)
        shaped(sig, out, shape, *(FLOAT_NAMES if result == "float" else INTEGER_NAMES))
        covers(params.tile, shape)
        if term is not None:
            self._check_term(sig, axis)

    def _check_term(self, sig: Signature, axis: int) -> None:
        source, out = sig.operands[0], len(sig.operands) - 1
        need(source.shape[axis] > 1, "a term needs more than 1 element along the reduced axis")
        deep = _deep(sig)
        need(
            len(deep) <= MAX_FULL_TERM_INPUTS,
            f"{len(deep)} inputs of the term vary along the axis; at most {MAX_FULL_TERM_INPUTS} "
            "may",
        )
        for i in deep:
            operand = typed(sig, i, *FLOAT_NAMES, *INTEGER_NAMES)
            need(
                operand.shape == source.shape and operand.strides == source.strides,
                f"operand {i} must have the shape and strides of operand 0",
            )
        for i in range(len(deep), out):
            typed(sig, i)
            broadcasts(sig, i, out)
        term = sig.read(ReduceParams).term or []
        need(expression.reads(term).issuperset(range(out)), "the term does not read all inputs")
        used, dims, allowed = expression.indices(term), len(source.shape), MAX_FOLDED_DIMS
        need(
            not used or dims <= allowed,
            f"a term that uses element indices may have at most {allowed} dimensions, got {dims}",
        )
        inner = -1 in used and axis != dims - 1
        need(not inner, "the term uses the last dimension's index, but another one is reduced")

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[-1].shape), sig.read(ReduceParams).tile)

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        params = sig.read(ReduceParams)
        source, out = (sig.operands[i].shape for i in (0, -1))
        last = len(sig.operands) - 1
        lo, hi = tile_box(out, coord, params.tile)
        axis = params.axis - max(4, len(source)) + len(source)
        deep = _deep(sig)
        begin, end = (*lo[:axis], 0, *lo[axis + 1 :]), (*hi[:axis], source[axis], *hi[axis + 1 :])
        return [
            *(Access(i, begin, end) for i in deep),
            *(broadcast_access(sig, i, lo, hi) for i in range(len(deep), last)),
            Access(last, lo, hi, write=True),
        ]

    def scratch(self, sig: Signature, machine: Machine) -> int:
        threads = machine.lanes * machine.warps
        size = _total_bytes(sig)
        if self._last(sig):
            return 2 * size * machine.warps
        if not machine.cooperative:
            return size * int(sig.read(ReduceParams).tile[3])
        vector, across = self._across(sig, machine)
        return size * threads // across * across * vector

    def _last(self, sig: Signature) -> bool:
        """True if the last dimension is reduced."""
        return bool(sig.read(ReduceParams).axis == max(4, len(sig.operands[0].shape)) - 1)

    def _vector(self, sig: Signature) -> int:
        source = sig.operands[0]
        vector = min(8, *(16 // sig.operands[i].itemsize for i in _deep(sig)))
        while vector > 1 and any(s % vector for s in source.strides[:-1]):
            vector //= 2
        return vector

    def _across(self, sig: Signature, machine: Machine) -> tuple[int, int]:
        """How a block reads the columns of a tile: the number of elements of a vector load, and the
        number of such loads side by side in a row of the input.
        """
        params = sig.read(ReduceParams)
        vector = self._vector(sig)
        last, tile = sig.operands[-1].shape[-1], int(params.tile[3])
        while vector > 1 and (last % vector or tile % vector):
            vector //= 2
        threads = machine.lanes * machine.warps
        count = text.pad4(sig.operands[0].shape, 1)[params.axis]
        # Wide tiles are better: threads of different columns do not wait for each other.
        columns = threads * vector * COLUMN_ELEMENTS_PER_THREAD // count
        wide = min(tile, threads, max(BLOCK_COLUMNS, columns))
        across = 1
        while across * vector < wide and 2 * across <= threads:
            across *= 2
        return vector, across

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        return (
            self._rows(name, sig, machine) if self._last(sig) else self._columns(name, sig, machine)
        )

    def _forms(self, sig: Signature) -> tuple[str, str, str]:
        """The names of the function that combines two elements, of their C type, and of the
        result's tile type.
        """
        params = sig.read(ReduceParams)
        tile = tile_type(params.tile, fold(sig.operands[-1].shape))
        return FOLDS[params.function], _total(sig), tile

    def _value(self, sig: Signature) -> str:
        params = sig.read(ReduceParams)
        return stored_text(params.function, params.count)

    def _source(self, sig: Signature, parameters: Sequence[str], names: Sequence[str]) -> str:
        """The text of a lambda that returns the address of the first element to reduce for a
        result. parameters: the lambda's parameters. names: the first element's indices. With a
        term, the text of an object that also computes the term's values.
        """
        params = sig.read(ReduceParams)
        term = params.term
        if not term:
            return text.place(sig, 0, parameters, names)
        deep, out = _deep(sig), len(sig.operands) - 1
        flat = range(len(deep), out)
        at = [f"{text.pointer(sig, i)} + ({text.offset(sig, i, names)})" for i in deep]
        beside = [*names[:-1], names[-1] if self._last(sig) else f"({names[-1]} + column)"]
        given = [text.load(sig, i, text.pointer(sig, i), text.offset(sig, i, beside)) for i in flat]
        leaves = [("ab"[i], text.loaded(sig, i)) for i in deep]
        leaves += [(f"m[{n}]", "float") for n in range(len(flat))]
        along = "at"
        if not self._last(sig):
            along = f"(at / {text.pad4(sig.operands[0].strides, 0)[params.axis]})"
        indices = list(names)
        indices[params.axis] = along
        writer = expression.Writer(leaves, text.literal, indices)
        result, _ = writer.write(term)
        compute, rows = _compute(sig), max(1, len(flat))
        value = f"static_cast<{compute}>({result})"
        if params.function == "sums":
            compute, value = "ArkSums", f"ArkSums{{a, {value}}}"
        lines = "".join(f"{line} " for line in writer.statements)
        second = text.loaded(sig, deep[-1])
        filled = "".join(f"m[{n}] = {number}; " for n, number in enumerate(given))
        unused = "".join(f"(void){p}; " for p in parameters)
        two = str(len(deep) > 1).lower()
        return (
            f"[&]({', '.join(f'int {p}' for p in parameters)}) {{ {unused}\n"
            f"        return ark_terms<{compute}, {two}, {rows}>({at[0]}, {at[-1]},\n"
            f"            [=](float (&m)[{rows}], int column) {{\n"
            f"              (void)m; (void)column; {filled}}},\n"
            f"            [=]({text.loaded(sig, 0)} a, {second} b, const float (&m)[{rows}],\n"
            f"                ark_i64 at) {{\n"
            f"              (void)a; (void)b; (void)m; (void)at; {lines}\n"
            f"              return {value}; }}); }}"
        )

    def _in_flight(self, sig: Signature, vector: int, most: int = BYTES_IN_FLIGHT) -> int:
        """The number of vectors of `vector` elements that a thread has in flight."""
        nbytes = vector * max(sig.operands[i].itemsize for i in _deep(sig))
        return max(MIN_IN_FLIGHT, min(MAX_IN_FLIGHT, most // nbytes))

    def _short(self, sig: Signature, vector: int, rows: int, machine: Machine) -> tuple[int, ...]:
        """How short rows are reduced: the number of lanes that reduce a row, the number of vectors
        per lane, and the number of rows that a thread has in flight. (0, 1, 1) for longer rows.
        """
        columns = fold(sig.operands[0].shape)[3]
        vectors = columns // vector
        short = vectors <= MAX_SHORT_ROW_VECTORS * machine.lanes
        if not machine.cooperative or columns % vector or not short:
            return 0, 1, 1
        nbytes = vector * sig.operands[0].itemsize
        threads = machine.warps * machine.lanes
        least = max(SECTOR_BYTES // nbytes, threads // rows)
        least = max(-(-vectors // MAX_VECTORS_PER_LANE), min(vectors, least))
        part = 1 << (least - 1).bit_length()
        if part >= machine.lanes:
            return 0, 1, 1
        each = -(-vectors // part)
        most = SHORT_WORDS_IN_FLIGHT // (each * max(1, nbytes // 4))
        at_once = -(-rows * part // threads)
        return part, each, max(1, min(MAX_VECTORS_PER_LANE, most, at_once))

    def _rows(self, name: str, sig: Signature, machine: Machine) -> str:
        out = len(sig.operands) - 1
        names = text.indices(sig.operands[out].shape, [*NAMES[:3], "0"])
        vector, narrow = self._vector(sig), 1
        rows = math.prod(sig.read(ReduceParams).tile[:3])
        team, columns = team_of(rows, machine), fold(sig.operands[0].shape)[3]
        short = self._short(sig, vector, rows, machine)
        if not machine.cooperative:
            vector, narrow = MAX_VECTOR_SUMS, MAX_VECTOR_SUMS
        some = [
            max(1, min(self._in_flight(sig, p), -(-columns // (p * team * machine.lanes))))
            for p in (vector, narrow)
        ]
        constants = (*self._forms(sig), columns, vector, narrow, *some, team, *short)
        at = text.pointer(sig, out, const=False), text.offset(sig, out, names)
        store = text.store(sig, out, *at, self._value(sig))
        arguments = (
            self._source(sig, NAMES[:3], names),
            f"[&](int i0, int i1, int i2, {_total(sig)} v) {{ {_UNUSED}{store} }}",
            text.addresses(sig, _deep(sig)),
        )
        return text.call(name, "ark_reduce_last", constants, arguments)

    def _columns(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ReduceParams)
        axis = params.axis
        out = len(sig.operands) - 1
        names = text.indices(sig.operands[out].shape, NAMES)
        inner = list(names)
        inner[axis] = "0"
        vector, across = self._across(sig, machine)
        scalar = min(machine.lanes * machine.warps, across * vector)
        if scalar != across * vector:
            vector, across = 1, scalar
        count = text.pad4(sig.operands[0].shape, 1)[axis]
        stride = text.pad4(sig.operands[0].strides, 0)[axis]
        tile = params.tile
        vectors, threads = math.prod(tile) // vector, machine.lanes * machine.warps
        rounds = -(-vectors // threads)
        blocks = math.prod(tile[:3]) * -(-tile[3] // (across * vector))
        # alone: each thread reduces columns by itself. Otherwise a block needs two barriers for
        # each group of columns.
        alone = machine.cooperative and blocks * LOADS_PER_BARRIER_PAIR > rounds * count
        many = machine.variant.name == "matrix" and len(_deep(sig)) == 1  # registers for more loads
        in_flight = self._in_flight(sig, vector, BYTES_IN_FLIGHT * (2 if many else 1))
        constants = (
            *self._forms(sig),
            count,
            stride,
            vector,
            min(2 * in_flight, MAX_IN_FLIGHT) if alone else in_flight,
            across,
            scalar,
            alone,
        )
        arguments = (
            self._source(sig, NAMES, inner),
            text.place(sig, out, NAMES, names, const=False),
            f"[&]({sig.operands[out].ctype}* to, int k, {_total(sig)} v) "
            f"{{ {text.store(sig, out, 'to', 'k', self._value(sig))} }}",
            text.addresses(sig, _deep(sig)),
        )
        return text.call(name, "ark_reduce_across", constants, arguments)


register(Reduce())
