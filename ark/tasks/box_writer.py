"""Writes the bodies of device functions that compute an expression for every index of a tile: of
the task kinds `elementwise`, `remap`, `gather` and `transpose`. box.h has the loops; this module
writes the operands' indices and the expression.

Each of many threads has several vectors in flight, loaded by 16-byte accesses if possible. A single
thread runs nested loops that compilers vectorise. If elements of the output share a byte, a thread
computes whole bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ark.ir.fold import fold
from ark.machine import Machine
from ark.machine.capability import Capability
from ark.plan.kind import Signature
from ark.tasks import expression, text
from ark.tasks.box_loads import THREAD_BYTES_IN_FLIGHT, vectors_in_flight
from ark.tasks.box_text import (
    NAMES,
    Vectors,
    declared,
    in_order,
    loop,
    tile_type,
    unused_names,
)

MAX_VECTOR_LOAD_BYTES = 256  # bytes of loads for one vector
MAX_VECTORS_IN_FLIGHT, MAX_ELEMENTS_IN_FLIGHT = 4, 8  # in each thread
MIN_WHOLE_VECTORS = 4  # fewest whole vectors of a row with a partial one, if there are several rows
# The record of a task (the struct that the device reads) has one bit for each operand that the
# previous task of the processor computed, so that it may still be in registers.
MAX_KEPT_OPERANDS = 16


def write_box(
    sig: Signature,
    expr: expression.Tree,
    tile: Sequence[int],
    machine: Machine,
    places: Mapping[int, Sequence[str]] | None = None,
    guard: tuple[str, str] = ("", ""),
    once: bool = False,
    apart: bool = False,
) -> str:
    """The text of a device function that computes `expr` for every index of the task's tile.

    places: for each operand that is not read at the output's indices, the texts of its indices.
    guard: two C++ expressions: a condition on the output's indices, and the value that replaces
    operand 0's element where the condition is false. If the condition does not depend on the last
    index, operand 0 is read even where it is false, so that all its indices must be in bounds.
    once: no element of operand 0 is read twice, although it is in `places`. apart: True to store
    vectors even if operand 0 is read element by element.
    """
    writer = BoxWriter(sig, expr, tile, dict(places or {}), guard, once, apart)
    if sig.operands[writer.out].per_item > 1:
        return writer.declare() + writer.shared()
    if not machine.cooperative:
        return writer.declare() + writer.nested()
    return by_threads(writer, machine)


def by_threads(writer: BoxWriter, machine: Machine) -> str:
    """The text of a device function that computes a tile by all threads."""
    sig, declare, choices = writer.sig, writer.declare(), writer.choices()
    if not choices:
        return declare + writer.flat(Vectors(), machine)
    # The function has one branch for each way to access vectors. If there is only one, the loop
    # also loads the vectors of its next iteration ahead, while it computes the current ones.
    # Several such loops in one function would spill registers.
    branches = [
        f"if (ark_aligned({text.addresses(sig, sorted(vectors.whole))})) {{\n"
        f"{writer.flat(vectors, machine, len(choices) == 1)}  }}"
        for vectors in choices
    ]
    single = writer.flat(Vectors(), machine, ahead=False)
    return f"{declare}  {' else '.join(branches)} else {{\n{single}  }}\n"


class BoxWriter:
    """Writes the loop body of an elementwise device function; box.h has the loops."""

    def __init__(
        self,
        sig: Signature,
        expr: expression.Tree,
        tile: Sequence[int],
        places: dict[int, Sequence[str]],
        guard: tuple[str, str] = ("", ""),
        once: bool = False,
        apart: bool = False,
    ) -> None:
        self.sig, self.expr, self.tile, self.places = sig, expr, tile, places
        self.guard, self.once, self.apart = guard, once, apart
        self.out = self._first_output()
        self.full = sig.operands[self.out].shape
        self.shape = fold(self.full)
        self.indices = text.indices(self.full, NAMES)
        self.box = tile_type(tile, self.shape)
        self.keeps = 0  # vectors of the result that a run of tasks keeps in registers

    def _first_output(self) -> int:
        """The number of the first operand that is a result."""
        return len(self.sig.operands) - 1

    def declare(self) -> str:
        """C++ declarations of the pointers to all operands."""
        sig, out = self.sig, self.out
        return "".join(text.operand(sig, i, f"p{i}", i < out) for i in range(len(sig.operands)))

    def _at(self, index: int) -> str:
        return text.offset(self.sig, index, self.places.get(index, self.indices))

    def choices(self) -> list[Vectors]:
        """The ways in which vectors can be accessed, the fastest first. Each requires that the
        operands in `Vectors.whole` are aligned; the device function checks unknown alignments.
        """
        vectors, operands = self.vectors(), self.sig.operands
        if vectors.size == 1:
            return []
        unsure = {
            i
            for i in vectors.whole - set(self.places)
            if i < self.out and not (operands[i].aligned or operands[i].per_item > 1)
        }
        loose = Vectors(vectors.size, vectors.whole - unsure, vectors.loose | unsure)
        return [vectors, loose] if unsure else [vectors]

    def vectors(self) -> Vectors:
        """The vectors that the operands' shapes and strides allow.

        A vector is `size` neighbouring elements. Each row of the innermost dimension must consist
        of whole vectors, except that a row may end with a partial vector if it is the only one or
        if rows are padded in memory to whole vectors. If the strides of an input's other dimensions
        are not multiples of a vector, its vectors may be unaligned (`Vectors.loose`).
        """
        sizes = [o.itemsize for o in self.sig.operands]
        vector = min(16 if max(sizes) == 1 else 8, text.VECTOR_BYTES // min(sizes))
        while vector > 1 and vector * sum(sizes[: self.out]) > MAX_VECTOR_LOAD_BYTES:
            vector //= 2
        row = self.shape[3]
        cut = self.tile[3] != row
        while vector > 1 and (
            (cut and self.tile[3] % vector) or (row % vector and not self._ends_apart(vector))
        ):
            vector //= 2
        packed, loose = set(), set()
        for i, operand in enumerate(self.sig.operands):
            if i in self.places:
                inner = [NAMES[3] in place for place in self.places[i]]
                if not any(inner):
                    continue
                guarded = not i and NAMES[3] in self.guard[0]
                if self.places[i][-1] != NAMES[3] or any(inner[:-1]) or guarded:
                    if i == 0 and self.apart:
                        continue
                    return Vectors()
            shape, strides = text.pad4(operand.shape, 1), text.pad4(operand.strides, 0)
            if shape[-1] == 1 and row != 1:
                continue
            if strides[-1] != 1:
                return Vectors()
            if any(n > 1 and s % vector for n, s in zip(shape[:-1], strides[:-1], strict=True)):
                if i >= self.out or i in self.places or operand.per_item > 1:
                    return Vectors()
                loose.add(i)
                continue
            packed.add(i)
        return Vectors(vector, frozenset(packed), frozenset(loose)) if vector > 1 else Vectors()

    def _ends_apart(self, vector: int) -> bool:
        """True if rows of the result may end with a partial vector: the result is one row, or its
        rows are padded to whole vectors in memory.
        """
        operand = self.sig.operands[self.out]
        single = math.prod(self.shape[:3]) == 1
        rows = zip(operand.shape[:-1], operand.strides[:-1], strict=True)
        padded = not self.places and all(s % vector == 0 for n, s in rows if n > 1)
        least = vector if single else MIN_WHOLE_VECTORS * vector
        return self.shape[3] >= least and (single or padded)

    def _value(self, index: int) -> str:
        """The C++ text that loads an element of operand `index` from memory."""
        value = text.load(self.sig, index, f"p{index}", self._at(index))
        return value if index or not self.guard[0] else self._or_fill(self.guard[0], value)

    def _or_fill(self, condition: str, value: str) -> str:
        """The text of `value`, an element of operand 0, or of the guard's value in place of it."""
        kind = text.loaded(self.sig, 0)
        return (
            f"({condition} ? static_cast<{kind}>({value}) : static_cast<{kind}>({self.guard[1]}))"
        )

    def _compute(self, values: Sequence[str], to: str, at: str, step: str = "") -> str:
        """Statements that compute one element from the texts of its inputs and store it at to[at].
        step: text that is added to the last index.
        """
        leaves = [(value, text.loaded(self.sig, i)) for i, value in enumerate(values)]
        indices = [*self.indices[:-1], self.indices[-1] + step]
        writer = expression.Writer(leaves, text.literal, indices)
        rounded = self.sig.operands[self.out].dtype in expression.SIXTEEN_BITS
        result, _ = writer.write(self.expr, rounded)
        lines = [*writer.statements, text.store(self.sig, self.out, to, at, result)]
        return "".join(f"    {line}\n" for line in lines)

    def _once(self, index: int) -> bool:
        """True if each element of this operand is read for at most one element of the result."""
        if index in self.places:
            return index == 0 and self.once
        shape, strides = self.sig.operands[index].shape, self.sig.operands[index].strides
        spread = math.prod(shape) == math.prod(self.sig.operands[self.out].shape)
        return spread and all(strides)

    def _element(self) -> str:
        """C++ statements that compute and store one element of the result."""
        values = [self._value(i) for i in range(self.out)]
        return self._compute(values, f"p{self.out}", self._at(self.out))

    def nested(self) -> str:
        """The loops over the tile for a single thread, in the order of the indices."""
        return in_order(self.tile, self.shape, self._element())

    def rounds(self, vectors: Vectors, machine: Machine, whole: bool = False) -> int:
        """The number of vectors that a thread loads before it uses any of them. whole: True to
        return 0 unless all vectors of the thread are in one round.
        """
        vector = vectors.size
        total, threads = math.prod(self.tile) // vector, machine.lanes * machine.warps
        # A loose (unaligned) vector counts twice: it is loaded as the two vectors that it overlaps.
        read = [*vectors.whole | ({0} if self.apart else set()), *vectors.loose, *vectors.loose]
        most, least = MAX_VECTORS_IN_FLIGHT * (2 if vectors.loose else 1), text.VECTOR_BYTES
        if vector == 1:
            read, most, least = list(range(self.out)), MAX_ELEMENTS_IN_FLIGHT, 1
        few = vectors_in_flight(self.sig, read, self.out, vector, least, self.places, machine)
        rounds = max(1, min(most, few, total // threads))
        return 0 if whole and total > rounds * threads else rounds

    def _varies(self) -> bool:
        """True if neighbours of the result are computed from distant elements of operand 0."""
        return self.apart and any(NAMES[3] in place for place in self.places[0])

    def _matches_result(self, index: int) -> bool:
        """True if the operand has the same type and the same number of elements as the result."""
        a, b = self.sig.operands[index], self.sig.operands[self.out]
        return a.dtype == b.dtype and math.prod(a.shape) == math.prod(b.shape)

    def flat(self, vectors: Vectors, machine: Machine, ahead: bool = True) -> str:
        """The loop of a tile by all threads, each of which has several vectors in flight.
        ahead: True to load the next vectors while the current ones are computed, if possible.
        """
        if ahead and self.several(vectors, machine):
            return self._deep(vectors, machine)
        constants = f"{self.box}, {vectors.size}, {self.rounds(vectors, machine)}"
        body = "".join(self._round(vectors, machine, "round"))
        body = loop("ark_each_round", constants, "const auto& round", (), body)
        return body + self.left(vectors)

    def _round(
        self, vectors: Vectors, machine: Machine, place: str, held: str = ""
    ) -> tuple[str, str, str]:
        """The source texts for a round, in which a thread processes several vectors:
        declarations of the loaded operands, statements that load them, and statements that compute
        and store the results. place: the C++ text of the round (an ArkRound of box.h). held: the
        prefix of the names of the loaded operands.
        """
        vector, rounds = vectors.size, self.rounds(vectors, machine)
        declare, fetch, unpack, values = "", "", "", []
        for i in range(self.out):
            operand, v = self.sig.operands[i], f"{held}v{i}[u]"
            width = vector if i in vectors.whole | vectors.loose else 1
            guarded = i == 0 and bool(self.guard[0])
            if width < vector and i == 0 and self._varies():
                declare += f"    {text.loaded(self.sig, i)} v{i}[{rounds}][{vector}] = {{}};\n"
                fetch += (
                    f"      const int first = {NAMES[3]};\n#pragma unroll\n"
                    f"      for (int j = 0; inside && j < {vector}; ++j) {{\n"
                    f"        const int {NAMES[3]} = first + j;\n"
                    f"        {v}[j] = {self._value(i)};\n      }}\n"
                )
                values.append(f"{v}[j]")
                continue
            if width < operand.per_item or (guarded and width == 1):
                declare += f"    {text.loaded(self.sig, i)} v{i}[{rounds}] = {{}};\n"
                fetch += f"      if (inside) {v} = {self._value(i)};\n"
                values.append(v)
                continue
            count = width // operand.per_item
            at = self._at(i) if operand.per_item == 1 else f"({self._at(i)}) / {operand.per_item}"
            kind, load, needed, loaded = "ArkHeld", "ark_hold", "inside", f"ark_unpacked({v})"
            if i in vectors.loose:
                kind, load, loaded = "ArkLoosePack", "ark_load_loose", f"ark_shifted({v})"
            elif self._once(i):
                load += "_past" if self.out == 1 or self.once else "_once"
            keepable = i < MAX_KEPT_OPERANDS and i in vectors.whole
            if self.keeps and keepable and self._matches_result(i):
                kept = f"n > 0u && t.flow >> {16 + i} & 1u"
                needed, loaded = f"inside && !({kept})", f"{kept} ? kept[u] : {loaded}"
            declare += f"    {kind}<{operand.ctype}, {count}> v{i}[{rounds}] = {{}};\n"
            fetch += f"      if ({needed}) {load}({v}, p{i} + {at});\n"
            unpack += f"      const auto w{i} = {loaded};\n"
            value = text.load(self.sig, i, f"w{i}.v", "j" if width > 1 else "0")
            if guarded:
                declare += f"    bool there[{rounds}];\n"
                fetch += f"      there[u] = {self.guard[0]};\n"
                value = self._or_fill("there[u]", value)
            values.append(value)
        each = (
            f"    ark_each_pack({place}, [&](int u, bool inside, {declared(NAMES)}) {{\n"
            f"      (void)u; {unused_names(NAMES)}\n"
        )
        load = f"{each}{fetch}    }});\n" if fetch else ""
        store = self._store(values, vector)
        return declare, load, f"{each}{unpack}{store}    }});\n"

    def _store(self, values: Sequence[str], vector: int) -> str:
        """Statements that compute and store one vector from its inputs' values."""
        ctype = self.sig.operands[self.out].ctype
        compute = self._compute(values, "to", "j", " + j" if vector > 1 else "")
        to = f"p{self.out} + {self._at(self.out)}"
        name, rare = ("rare", ", auto&& ark_rare") if "ark_rare" in compute else ("made", "")
        store = (
            f"      ark_store_{name}<{vector}>(inside, {to}, [&]({ctype}* to, int j{rare}) {{\n"
            f"{compute}      }});\n"
        )
        if self.keeps:
            store = (
                f"      {ctype}* to = kept[u].v;\n#pragma unroll\n"
                f"      for (int j = 0; j < {vector}; ++j) {{\n{compute}      }}\n"
                f"      if (inside) ark_store_pack<{vector}>({to}, kept[u]);\n"
            )
        return store

    def several(self, vectors: Vectors, machine: Machine) -> bool:
        """True if a thread loads its next round of vectors during the current one. In the
        variant `block`: if a round has less than half of the bytes that a thread should have in
        flight. In `matrix`, whose threads have more registers: if there are several inputs.
        """
        able = machine.variant.name in ("block", "matrix") and machine.has(Capability.ROUNDS_AHEAD)
        if self.places or self.keeps or not self.out or not able:
            return False
        if any(o.per_item > 1 for o in self.sig.operands):
            return False
        inputs = [i for i in (*vectors.whole, *vectors.loose, *vectors.loose) if i < self.out]
        loaded = vectors.size * sum(self.sig.operands[i].itemsize for i in inputs)
        most = THREAD_BYTES_IN_FLIGHT - 1
        if machine.variant.name == "matrix":
            most = 2 * THREAD_BYTES_IN_FLIGHT if len(inputs) > 1 else 0
        rounds = self.rounds(vectors, machine)
        several = math.prod(self.tile) // vectors.size > rounds * machine.lanes * machine.warps
        return several and 2 * rounds * loaded <= most

    def ahead(self, vectors: Vectors, machine: Machine) -> tuple[str, str, str]:
        """The texts for ark_claimed_ahead (claimed.h) and ark_each_round_ahead (box.h): the members
        of a struct with the loaded operands of a round, statements that load them into `h`, and
        statements that compute and store the results.
        """
        place = f"ArkRound<{self.box}, {vectors.size}, {self.rounds(vectors, machine)}>"
        held, load, finish = self._round(vectors, machine, f"{place}{{h.coord, h.first}}", "h.")
        coords = "".join(f"    h.coord[{d}] = t.coord[{d}];\n" for d in range(4))
        return (
            f"    ark_i32 coord[4];\n    int first;\n{held}",
            f"{coords}    h.first = first;\n{load}",
            finish,
        )

    def left(self, vectors: Vectors) -> str:
        """The loop over the single elements at the ends of rows, if there are any."""
        if vectors.size == 1 or not self.shape[3] % vectors.size:
            return ""
        return loop("ark_each_left", f"{self.box}, {vectors.size}", "", NAMES, self._element())

    def _deep(self, vectors: Vectors, machine: Machine) -> str:
        """The loop of a tile by all threads, which load a round of vectors ahead."""
        held, load, finish = self.ahead(vectors, machine)
        constants = f"Held, {self.box}, {vectors.size}, {self.rounds(vectors, machine)}"
        return (
            f"  struct Held {{\n{held}  }};\n"
            f"  ark_each_round_ahead<{constants}>([&](Held& h, int first) {{\n{load}  }}, "
            f"[&](Held& h) {{\n{finish}  }});\n{self.left(vectors)}"
        )

    def shared(self) -> str:
        """The loop of all threads for an output of a type with several elements in a byte. A thread
        computes a whole byte at a time.
        """
        operand = self.sig.operands[self.out]
        values = [self._value(i) for i in range(self.out)]
        start = self._at(self.out).replace(NAMES[3], "first")
        body = (
            f"    {operand.ctype} w{{}};\n"
            f"    for (int j = 0; j < {operand.per_item}; ++j) {{\n"
            "      const int i3 = first + j <= last ? first + j : first;\n"
            f"{self._compute(values, '&w', 'j')}    }}\n"
            f"    p{self.out}[({start}) / {operand.per_item}] = w;\n"
        )
        names = (*NAMES[:3], "first", "last")
        return loop("ark_each_byte", f"{self.box}, {operand.per_item}", "", names, body)
