"""The task kind `elementwise`: an expression over broadcast operands; also casts, copies, fills.

params: expr (a tree of ark.tasks.expression over the inputs), tile (4 sizes). operands: inputs...,
output. coord: the tile's first index per dimension; more than four dimensions are folded
(ark.ir.fold). With no input the output is filled with the expression's value. The output may be the
same memory as an input.

Each of many threads has several packs (vectors of neighbouring elements) in flight, loaded by
16-byte accesses if possible. A single thread runs nested loops that compilers vectorise. If
elements of the output share a byte, a thread computes whole bytes. box.h has the loops; this module
writes the operands' indices and the expression.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ark.ir.fold import fold, tile_of, unfold
from ark.machine import Machine
from ark.plan.kind import Access, Signature, TaskKind, register
from ark.plan.params import Params, Places, Tile, TiledParams, box, covers, need
from ark.tasks import expression, text
from ark.tasks.box_text import NAMES, declared, in_order, loop, tile_type, unused_names
from ark.tasks.claimed import claim_constants

VECTOR_BYTES = 16
THREAD_BYTES_IN_FLIGHT = 128  # bytes of loads that a thread has in flight
MAX_VECTOR_LOAD_BYTES = 256  # bytes of loads for one pack
PACKS, SINGLES = 4, 8  # the most packs that a thread has in flight, and the most single elements
CLAIM_BYTES = 32768  # bytes of a tile that is claimed
MAX_KEPT_OPERANDS = 16  # a task's record has so many bits: operand computed by the previous task
COPY = expression.leaf(0)
HEADERS = (text.header("box.h"),)


def copy_params(tile: Sequence[int]) -> ElementwiseParams:
    """The parameters of elementwise tasks that copy their input, with this tile size."""
    return ElementwiseParams(COPY, tuple(tile))


def broadcast_access(
    sig: Signature, index: int, lo: Sequence[int], hi: Sequence[int], write: bool = False
) -> Access:
    """The access to the elements of a broadcast operand that the box lo..hi of the output needs."""
    shape = sig.operands[index].shape
    cut = len(lo) - len(shape)
    tail_lo, tail_hi = tuple(lo)[cut:], tuple(hi)[cut:]
    return Access(
        index,
        tuple(0 if n == 1 else b for b, n in zip(tail_lo, shape, strict=True)),
        tuple(1 if n == 1 else min(e, n) for e, n in zip(tail_hi, shape, strict=True)),
        write,
    )


def broadcasts(sig: Signature, index: int, out: int) -> None:
    """Raises PlanError unless operand `index` broadcasts to operand `out`: it has no more
    dimensions, each of the same size or of size 1.
    """
    shape, target = sig.operands[index].shape, sig.operands[out].shape
    need(
        len(shape) <= len(target)
        and all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)),
        f"operand {index} of shape {list(shape)} does not broadcast to {list(target)}",
    )


def tile_box(
    shape: Sequence[int], coord: Sequence[int], tile: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first index of the tile at `coord`, and the index after its last, in each dimension."""
    sizes = fold(shape)
    hi = [min(c + s, n) for c, s, n in zip(coord, tile, sizes, strict=True)]
    return unfold(shape, coord, hi)


class ElementwiseParams(Params, frozen=True):
    expr: list[Any]
    tile: Tile


class Elementwise(TaskKind):
    name = "elementwise"
    claimable = True
    params = ElementwiseParams

    def check(self, sig: Signature) -> None:
        super().check(sig)
        params = sig.read(ElementwiseParams)
        need(len(sig.operands) > 0, "it has no operand to write")
        out = len(sig.operands) - 1
        shape, tile = sig.operands[out].shape, params.tile
        expression.check(params.expr, [o.dtype for o in sig.operands[:out]], len(shape))
        for index in range(out):
            broadcasts(sig, index, out)
        covers(tile, shape)
        each = sig.operands[out].per_item
        need(
            tile[3] == shape[-1] or tile[3] % each == 0,
            f"tile {list(tile)} must be a multiple of the {each} elements in a byte",
        )

    def places(self, sig: Signature) -> Places:
        return box(fold(sig.operands[-1].shape), sig.read(ElementwiseParams).tile)

    def to_claim(self, sig: Signature, machine: Machine) -> Mapping[str, Any]:
        return claim_tile(sig)

    def in_place(self, sig: Signature) -> frozenset[int]:
        return frozenset(range(len(sig.operands) - 1))

    def accesses(self, sig: Signature, coord: Sequence[int]) -> list[Access]:
        out = len(sig.operands) - 1
        lo, hi = tile_box(sig.operands[out].shape, coord, sig.read(ElementwiseParams).tile)
        return [broadcast_access(sig, i, lo, hi, i == out) for i in range(out + 1)]

    def headers(self) -> tuple[str, ...]:
        return HEADERS

    def apart(self, sig: Signature, machine: Machine) -> int:
        params = sig.read(ElementwiseParams)
        if not machine.cooperative or any(o.per_item > 1 for o in sig.operands):
            return 0
        pack, packed = _Box(sig, params.expr, params.tile, {}).pack()
        # If alignment is checked at run time, consecutive tasks may use different vector sizes.
        return pack if pack == 1 or all(sig.operands[i].aligned for i in packed) else 0

    def source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ElementwiseParams)
        return text.function(name, write_box(sig, params.expr, params.tile, machine))

    def claiming_source(
        self, name: str, sig: Signature, machine: Machine, tasks: int, records: int
    ) -> str:
        if not machine.cooperative or any(o.per_item > 1 for o in sig.operands):
            return ""
        params = sig.read(ElementwiseParams)
        writer = _Box(sig, params.expr, params.tile, {})
        pack, packed = writer.pack()
        if pack == 1 or not writer.rounds(pack, packed, machine, whole=True):
            return ""
        constants = claim_constants(self, sig, tasks, records)
        out = len(sig.operands) - 1
        declare = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
        held, load, finish = writer.ahead(pack, packed, machine)
        addresses = text.addresses(sig, sorted(packed))
        each = f"[&](const ArkTask& t) {{\n{writer.flat(1, frozenset(), machine)}  }}"
        return f"struct {name}_held {{\n{held}}};\n" + text.function(
            name,
            f"{declare}  if (ark_aligned({addresses})) {{\n  ark_claimed_ahead<{name}_held, "
            f"{constants}>(c, t, [&]({name}_held& h, const ArkTask& t) {{\n{load}  }}, "
            f"[&]({name}_held& h) {{\n{finish}  }});\n  }} else {{\n"
            f"  ark_claimed<{constants}>(c, t, {each});\n  }}\n",
        )

    def run_source(self, name: str, sig: Signature, machine: Machine) -> str:
        params = sig.read(ElementwiseParams)
        out = len(sig.operands) - 1
        declare = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
        writer = _Box(sig, params.expr, params.tile, {})
        pack, packed = writer.pack()
        writer.keeps = writer.rounds(pack, packed, machine, whole=True)
        kept = f"  ArkPack<{sig.operands[out].ctype}, {pack}> kept[{writer.keeps}];\n"
        body = declare + writer.flat(pack, packed, machine)
        return text.run(name, body, kept if writer.keeps else "")


def claim_tile(sig: Signature, times: int = 1) -> Mapping[str, Any]:
    """The parameters with tiles of about `times` CLAIM_BYTES, at most as large as the present."""
    out, before = sig.operands[-1], sig.read(TiledParams).tile
    tile = tile_of(out.shape, times * CLAIM_BYTES // out.itemsize)
    smaller = all(t <= n for t, n in zip(tile, before, strict=True))
    return {**sig.params, "tile": tuple(tile) if smaller else tuple(before)}


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
    guard: a condition on the output's indices, and the value that replaces operand 0's element if
    it is false. If the condition does not depend on the last index, packs of operand 0 are read in
    any case and must be in bounds. once: no element of operand 0 is read twice, although it is in
    `places`. apart: store the result in packs even if operand 0 cannot be read in packs.
    """
    out = len(sig.operands) - 1
    declare = "".join(text.operand(sig, i, f"p{i}", const=i != out) for i in range(out + 1))
    writer = _Box(sig, expr, tile, dict(places or {}), guard, once, apart)
    if sig.operands[out].per_item > 1:
        return declare + writer.shared()
    if not machine.cooperative:
        return declare + writer.nested()
    pack, packed = writer.pack()
    if pack == 1:
        return declare + writer.flat(1, frozenset(), machine)
    addresses = text.addresses(sig, sorted(packed))
    return (
        f"{declare}  if (ark_aligned({addresses})) {{\n"
        f"{writer.flat(pack, packed, machine)}  }} else {{\n"
        f"{writer.flat(1, frozenset(), machine)}  }}\n"
    )


class _Box:
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
        self.out = len(sig.operands) - 1
        self.full = sig.operands[self.out].shape
        self.shape = fold(self.full)
        self.indices = text.indices(self.full, NAMES)
        self.box = tile_type(tile, self.shape)
        self.keeps = 0  # packs of the result that a run of tasks keeps in registers

    def _at(self, index: int) -> str:
        return text.offset(self.sig, index, self.places.get(index, self.indices))

    def pack(self) -> tuple[int, frozenset[int]]:
        """The number of elements of a pack (vector), and the operands that are read or written in
        packs; (1, empty) if packs are impossible.

        Each row of the innermost dimension must consist of whole packs, except that a single row
        may end with a partial pack. The strides of other dimensions must be multiples of a pack.
        """
        sizes = [o.itemsize for o in self.sig.operands]
        pack = min(8, VECTOR_BYTES // min(sizes))
        while pack > 1 and pack * sum(sizes[:-1]) > MAX_VECTOR_LOAD_BYTES:
            pack //= 2
        row = self.shape[3]
        alone = math.prod(self.shape[:3]) == 1
        cut = self.tile[3] != row
        while pack > 1 and (
            (cut and self.tile[3] % pack) or (not alone and row % pack) or row < pack
        ):
            pack //= 2
        packed = set()
        for i, operand in enumerate(self.sig.operands):
            if i in self.places:
                inner = [NAMES[3] in place for place in self.places[i]]
                if not any(inner):
                    continue
                guarded = not i and NAMES[3] in self.guard[0]
                if self.places[i][-1] != NAMES[3] or any(inner[:-1]) or guarded:
                    if i == 0 and self.apart:
                        continue
                    return 1, frozenset()
            shape, strides = text.pad4(operand.shape, 1), text.pad4(operand.strides, 0)
            if shape[-1] == 1 and row != 1:
                continue
            if strides[-1] != 1 or any(
                n > 1 and s % pack for n, s in zip(shape[:-1], strides[:-1], strict=True)
            ):
                return 1, frozenset()
            packed.add(i)
        return (pack, frozenset(packed)) if pack > 1 else (1, frozenset())

    def _value(self, index: int) -> str:
        """The text of an element of operand `index`, read from memory."""
        value = text.load(self.sig, index, f"p{index}", self._at(index))
        return value if index or not self.guard[0] else self._or_fill(self.guard[0], value)

    def _or_fill(self, condition: str, value: str) -> str:
        """The text of a value of operand 0 if the condition holds, otherwise of the guard's other
        value.
        """
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
        """True if no element of this operand is read for more than one element of the result."""
        if index in self.places:
            return index == 0 and self.once
        shape, strides = self.sig.operands[index].shape, self.sig.operands[index].strides
        spread = math.prod(shape) == math.prod(self.sig.operands[self.out].shape)
        return spread and all(strides)

    def _element(self) -> str:
        """Statements for one element of the result."""
        values = [self._value(i) for i in range(self.out)]
        return self._compute(values, f"p{self.out}", self._at(self.out))

    def nested(self) -> str:
        """The loop nest of a single thread, in order."""
        return in_order(self.tile, self.shape, self._element())

    def rounds(
        self, pack: int, packed: frozenset[int], machine: Machine, whole: bool = False
    ) -> int:
        """Packs that a thread has in flight. whole: 0 unless these are all packs of the thread."""
        total, threads = math.prod(self.tile) // pack, machine.lanes * machine.warps
        read = {*packed, 0} if self.apart else packed
        most, least = PACKS, VECTOR_BYTES
        if pack == 1:
            read, most, least = set(range(self.out)), SINGLES, 1
        loaded = sum(pack * self.sig.operands[i].itemsize for i in read if i != self.out)
        rounds = max(1, min(most, THREAD_BYTES_IN_FLIGHT // max(least, loaded), total // threads))
        return 0 if whole and total > rounds * threads else rounds

    def _varies(self) -> bool:
        """True if neighbouring results read elements of operand 0 that are not neighbours."""
        return self.apart and any(NAMES[3] in place for place in self.places[0])

    def _as_made(self, index: int) -> bool:
        """True if the operand has the same type and number of elements as the result."""
        a, b = self.sig.operands[index], self.sig.operands[self.out]
        return a.dtype == b.dtype and math.prod(a.shape) == math.prod(b.shape)

    def flat(self, pack: int, packed: frozenset[int], machine: Machine) -> str:
        """The loop of all threads, each with several packs in flight."""
        rounds = self.rounds(pack, packed, machine)
        held, fetch, values = "", "", []
        for i in range(self.out):
            operand = self.sig.operands[i]
            width = pack if i in packed else 1
            guarded = i == 0 and bool(self.guard[0])
            if width < pack and i == 0 and self._varies():
                held += f"    {text.loaded(self.sig, i)} v{i}[{rounds}][{pack}];\n"
                fetch += (
                    f"      const int first = {NAMES[3]};\n#pragma unroll\n"
                    f"      for (int j = 0; inside && j < {pack}; ++j) {{\n"
                    f"        const int {NAMES[3]} = first + j;\n"
                    f"        v{i}[u][j] = {self._value(i)};\n      }}\n"
                )
                values.append(f"v{i}[u][j]")
                continue
            if width < operand.per_item or (guarded and width == 1):
                held += f"    {text.loaded(self.sig, i)} v{i}[{rounds}];\n"
                fetch += f"      if (inside) v{i}[u] = {self._value(i)};\n"
                values.append(f"v{i}[u]")
                continue
            count = width // operand.per_item
            at = self._at(i) if operand.per_item == 1 else f"({self._at(i)}) / {operand.per_item}"
            held += f"    ArkPack<{operand.ctype}, {count}> v{i}[{rounds}];\n"
            load = "ark_load_pack"
            if self._once(i):
                alone = self.out == 1 or self.once
                load = "ark_load_pack_past" if alone else "ark_load_pack_once"
            read = f"{load}<{count}>(p{i} + {at})"
            if self.keeps and i < MAX_KEPT_OPERANDS and width == pack and self._as_made(i):
                read = f"n > 0u && t.flow >> {16 + i} & 1u ? kept[u] : {read}"
            fetch += f"      if (inside) v{i}[u] = {read};\n"
            value = text.load(self.sig, i, f"v{i}[u].v", "j" if width > 1 else "0")
            if guarded:
                held += f"    bool there[{rounds}];\n"
                fetch += f"      there[u] = {self.guard[0]};\n"
                value = self._or_fill("there[u]", value)
            values.append(value)
        ctype = self.sig.operands[self.out].ctype
        compute = self._compute(values, "to", "j", " + j" if pack > 1 else "")
        each = f"    ark_each_pack(round, [&](int u, bool inside, {declared(NAMES)}) {{\n"
        unused = f"      (void)u; {unused_names(NAMES)}\n"
        body = held
        if fetch:
            body += f"{each}{unused}{fetch}    }});\n"
        to = f"p{self.out} + {self._at(self.out)}"
        if self.keeps:
            body += (
                f"{each}{unused}      {ctype}* to = kept[u].v;\n#pragma unroll\n"
                f"      for (int j = 0; j < {pack}; ++j) {{\n{compute}      }}\n"
                f"      if (inside) ark_store_pack<{pack}>({to}, kept[u]);\n    }});\n"
            )
        else:
            body += (
                f"{each}{unused}      ark_store_made<{pack}>(inside, {to}, "
                f"[&]({ctype}* to, int j) {{\n{compute}      }});\n    }});\n"
            )
        box = f"{self.box}, {pack}"
        body = loop("ark_each_round", f"{box}, {rounds}", "const auto& round", (), body)
        if pack == 1 or not self.shape[3] % pack:
            return body
        return body + loop("ark_each_left", box, "int i3", (), self._single())

    def _single(self) -> str:
        """Statements for one element of a single row."""
        return f"    const int i0 = 0, i1 = 0, i2 = 0; {unused_names(NAMES)}\n{self._element()}"

    def ahead(self, pack: int, packed: frozenset[int], machine: Machine) -> tuple[str, str, str]:
        """The texts for ark_claimed_ahead (claimed.h), for a tile of one round: the members of a
        struct with the loaded operands, statements that load them into `h`, and statements that
        compute and store the results.
        """
        rounds = self.rounds(pack, packed, machine)
        held, fetch, unpack, values = "", "", "", []
        for i in range(self.out):
            if i not in packed:
                held += f"  {text.loaded(self.sig, i)} v{i}[{rounds}];\n"
                fetch += f"      if (inside) h.v{i}[u] = {self._value(i)};\n"
                values.append(f"h.v{i}[u]")
                continue
            hold = "ark_hold"
            if self._once(i):
                hold = "ark_hold_past" if self.out == 1 else "ark_hold_once"
            held += f"  ArkHeld<{self.sig.operands[i].ctype}, {pack}> v{i}[{rounds}];\n"
            fetch += f"      if (inside) {hold}(h.v{i}[u], p{i} + {self._at(i)});\n"
            unpack += f"      const auto w{i} = ark_unpacked(h.v{i}[u]);\n"
            values.append(text.load(self.sig, i, f"w{i}.v", "j"))
        ctype, box = self.sig.operands[self.out].ctype, f"{self.box}, {pack}"
        compute = self._compute(values, "to", "j", " + j")
        each = (
            f"    ark_each_pack(ArkRound<{box}, {rounds}>{{h.coord, ark_tid()}},\n"
            f"                  [&](int u, bool inside, {declared(NAMES)}) {{\n"
            f"      (void)u; {unused_names(NAMES)}\n"
        )
        coords = "".join(f"    h.coord[{d}] = t.coord[{d}];\n" for d in range(4))
        load = f"{coords}{each}{fetch}    }});\n"
        to = f"p{self.out} + {self._at(self.out)}"
        finish = (
            f"{each}{unpack}      ark_store_made<{pack}>(inside, {to}, "
            f"[&]({ctype}* to, int j) {{\n{compute}      }});\n    }});\n"
        )
        if self.shape[3] % pack:
            finish += (
                f"    ark_each_left<{box}>(h.coord, [&](int i3) {{\n{self._single()}    }});\n"
            )
        return f"  ark_i32 coord[4];\n{held}", load, finish

    def shared(self) -> str:
        """The loop of all threads for an output whose elements share bytes, one byte at a time."""
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


register(Elementwise())
