"""Random instruction words by format, for the tests of the decoder and the disassembler.

Field positions are those of AMD's instruction set documents, chapter "Microcode formats". Register
fields are multiples of eight where pairs and larger ranges must be aligned. All other bits are
random, and the caller drops words that the assembler refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any

Words = list[int]
Sampler = Callable[[Random, int], Words]


_VGPR_STEPS = 31  # register numbers are multiples of eight
_VECTOR_KINDS = 7  # alternatives of a vector source


def at(value: int, position: int) -> int:
    return value << position


def _scalar(rng: Random) -> int:
    inline = [rng.randrange(128, 209), rng.randrange(240, 249)]
    return rng.choice([rng.randrange(12) * 8, rng.randrange(12) * 8, 106, *inline, 255])


def _vector(rng: Random) -> int:
    vgpr = 256 + rng.randrange(_VGPR_STEPS) * 8
    inline = [rng.randrange(128, 209), rng.randrange(240, 249)]
    return rng.choice([vgpr, vgpr, vgpr, rng.randrange(12) * 8, 106, *inline])


def _vgpr(rng: Random) -> int:
    return rng.randrange(_VGPR_STEPS) * 8


def _literal(rng: Random) -> int:
    return rng.choice([rng.getrandbits(16), rng.getrandbits(32)])


def _sop1(rng: Random, op: int) -> Words:
    return [at(0x17D, 23) | at(op, 8) | at(rng.randrange(12) * 8, 16) | _scalar(rng), _literal(rng)]


def _sop2(rng: Random, op: int) -> Words:
    word = at(2, 30) | at(op, 23) | at(rng.randrange(12) * 8, 16) | _scalar(rng)
    return [word | at(rng.randrange(12) * 8, 8), _literal(rng)]


def _sopc(rng: Random, op: int) -> Words:
    word = at(0x17E, 23) | at(op, 16) | _scalar(rng)
    return [word | at(rng.randrange(12) * 8, 8), _literal(rng)]


def _sopk(rng: Random, op: int) -> Words:
    sdst = rng.choice([rng.randrange(12) * 8, 124])
    word = at(0xB, 28) | at(op, 23) | at(sdst, 16) | rng.getrandbits(16)
    return [word, _literal(rng)]


def _sopp(rng: Random, op: int) -> Words:
    return [at(0x17F, 23) | at(op, 16) | rng.choice([0, rng.randrange(16), rng.getrandbits(16)])]


def _dpp_control(rng: Random, rdna: bool) -> int:
    rows = [0x101, 0x111, 0x121]
    one_of = [rng.getrandbits(8), *(base + rng.randrange(15) for base in rows), 0x140, 0x141]
    one_of += [0x150 + rng.randrange(16)]
    one_of += [0x160 + rng.randrange(16)] if rdna else [0x130, 0x134, 0x138, 0x13C, 0x142, 0x143]
    return rng.choice(one_of)


def _short_vector(rng: Random, first: int, rdna: bool, compare: bool = False) -> Words:
    """Returns the words of a random VOP1, VOP2 or VOPC instruction with a plain source, a literal,
    DPP or SDWA.
    """
    form = rng.randrange(8)
    if form < 5:
        return [first | rng.choice([_vector(rng)] * 5 + [255]), _literal(rng)]
    source = _vgpr(rng)
    if form < 7 or (rdna and form == 7):
        if rdna and form == 7:
            return [first | rng.choice([233, 234]), source | at(rng.getrandbits(24), 8)]
        word = source | at(_dpp_control(rng, rdna), 8) | at(rng.getrandbits(8), 24)
        return [first | 250, word | at(rng.randrange(2), 19) | at(rng.randrange(2) * rdna, 18)]
    select = at(rng.randrange(7), 16) | at(rng.randrange(7), 24)
    if not compare:
        select |= at(rng.randrange(7), 8) | at(rng.randrange(3), 11)
    return [first | 249, source | select]


def _long_vector(rng: Random, first: int, compare: bool, exec_only: bool) -> Words:
    """Returns the words of a random VOP3 instruction. In half of the cases it has no modifiers."""
    sdst = 126 if exec_only else rng.randrange(12) * 8
    word = first | (sdst if compare else _vgpr(rng))
    second = _vector(rng) | at(_vector(rng), 9) | at(_vector(rng), 18)
    if rng.randrange(2):
        word |= at(rng.randrange(8), 8) | at(rng.randrange(2), 15)
        second |= at(rng.randrange(8), 29) | at(rng.choice([0, rng.randrange(4)]), 27)
        if rng.randrange(2):
            word |= at(rng.randrange(16), 11)
    return [word, second, _literal(rng)]


def _rdna3() -> dict[str, tuple[range, Sampler]]:
    def smem(rng: Random, op: int) -> Words:
        word = at(0x3D, 26) | at(op, 18) | at(rng.randrange(4), 13) | at(rng.randrange(6) * 16, 6)
        soffset = rng.choice([124, rng.randrange(100)])
        return [word | rng.randrange(12) * 4, at(soffset, 25) | rng.getrandbits(20)]

    def flat(segment: int) -> Sampler:
        def sample(rng: Random, op: int) -> Words:
            word = at(0x37, 26) | at(op, 18) | at(segment, 16) | at(rng.randrange(8), 13)
            word |= rng.getrandbits(12 if segment == 0 else 13)
            saddr = 124 if segment == 0 else rng.choice([124, rng.randrange(12) * 8])
            second = _vgpr(rng) | at(_vgpr(rng), 8) | at(saddr, 16) | at(_vgpr(rng), 24)
            return [word, second | at(rng.randrange(2) * (segment == 1), 23)]

        return sample

    def mubuf(rng: Random, op: int) -> Words:
        word = at(0x38, 26) | at(op, 18) | at(rng.randrange(8), 12) | rng.getrandbits(12)
        second = _vgpr(rng) | at(_vgpr(rng), 8) | at(rng.randrange(12) * 2, 16)
        soffset = rng.choice([124, 128, rng.randrange(100)])
        return [word, second | at(rng.randrange(4), 22) | at(soffset, 24)]

    def ds(rng: Random, op: int) -> Words:
        second = sum(at(_vgpr(rng), 8 * k) for k in range(4))
        return [at(0x36, 26) | at(op, 18) | rng.getrandbits(16), second]

    def vop3(rng: Random, op: int) -> Words:
        words = _long_vector(rng, at(0x35, 26) | at(op, 16), op < 256, 128 <= op < 256)
        if rng.randrange(6) == 5:  # DPP in the 64-bit encoding
            words[1] = words[1] & ~0x1FF | rng.choice([233, 250])
            control = _dpp_control(rng, True)
            words[2] = _vgpr(rng) | at(control, 8) | at(rng.getrandbits(8), 24)
        return words

    def vop3p(rng: Random, op: int) -> Words:
        word = at(0xCC, 24) | at(op, 16) | _vgpr(rng) | at(1, 14)
        second = at(3, 27)
        if op < 64:
            word |= at(rng.randrange(8), 8) | at(rng.randrange(8), 11)
            second |= at(rng.randrange(8), 29)
        second |= sum(at(256 + _vgpr(rng), 9 * k) for k in range(3))
        return [word, second]

    def vopd(rng: Random, op: int) -> Words:
        # The two operations of a VOPD must read vector registers in different banks (register
        # numbers modulo 4).
        base = rng.randrange(60) * 4
        x, y = op >> 5, op & 31
        source = rng.choice([256 + base, rng.randrange(100)])
        word = at(0x32, 26) | at(x, 22) | at(y, 17) | source | at(base + 1, 9)
        second = (256 + base + 1) | at(base + 2, 9) | at(rng.getrandbits(15), 17)
        return [word, second, rng.getrandbits(32)]

    def short(first: int, shift: int, wide: bool) -> Sampler:
        def sample(rng: Random, op: int) -> Words:
            word = first | at(op, shift) | at(_vgpr(rng), 9) * wide
            if first != at(0x3E, 25):
                word |= at(rng.getrandbits(8) & ~6, 17)
            return _short_vector(rng, word, True)

        return sample

    return {
        "SOP1": (range(80), _sop1),
        "SOP2": (range(64), _sop2),
        "SOPC": (range(64), _sopc),
        "SOPK": (range(28), _sopk),
        "SOPP": (range(64), _sopp),
        "SMEM": (range(64), smem),
        "VOP1": (range(128), short(at(0x3F, 25), 9, False)),
        "VOP2": (range(62), short(0, 25, True)),
        "VOPC": (range(256), short(at(0x3E, 25), 17, True)),
        "VOP3": (range(1024), vop3),
        "VOP3P": (range(70), vop3p),
        "VOPD": (range(16 * 32), vopd),
        "DS": (range(256), ds),
        "FLAT": (range(128), flat(0)),
        "SCRATCH": (range(128), flat(1)),
        "GLOBAL": (range(128), flat(2)),
        "MUBUF": (range(128), mubuf),
    }


def _cdna() -> dict[str, tuple[range, Sampler]]:
    def smem(rng: Random, op: int) -> Words:
        immediate = rng.randrange(2)
        word = at(0x30, 26) | at(op, 18) | at(rng.randrange(2), 16) | at(immediate, 17)
        word |= at(rng.randrange(6) * 16, 6) | rng.randrange(12) * 4
        return [word, rng.getrandbits(20) if immediate else rng.randrange(100)]

    def flat(segment: int) -> Sampler:
        def sample(rng: Random, op: int) -> Words:
            word = at(0x37, 26) | at(op, 18) | at(segment, 14) | at(rng.randrange(4), 16)
            word |= rng.getrandbits(12)
            saddr = 0x7F if segment == 0 else rng.choice([0x7F, rng.randrange(12) * 8])
            second = _vgpr(rng) | at(_vgpr(rng), 8) | at(saddr, 16) | at(_vgpr(rng), 24)
            return [word | at(rng.randrange(2) * (segment == 1), 13), second]

        return sample

    def mubuf(rng: Random, op: int) -> Words:
        word = at(0x38, 26) | at(op, 18) | at(rng.randrange(8), 12) | rng.getrandbits(12)
        second = _vgpr(rng) | at(_vgpr(rng), 8) | at(rng.randrange(12) * 2, 16)
        return [word, second | at(rng.choice([128, rng.randrange(100)]), 24)]

    def ds(rng: Random, op: int) -> Words:
        second = sum(at(_vgpr(rng), 8 * k) for k in range(4))
        return [at(0x36, 26) | at(op, 17) | rng.getrandbits(16) | at(rng.randrange(2), 25), second]

    def vop3(rng: Random, op: int) -> Words:
        return _long_vector(rng, at(0x34, 26) | at(op, 16), op < 256, False)[:2]

    def vop3p(rng: Random, op: int) -> Words:
        word = at(0x1A7, 23) | at(op, 16) | _vgpr(rng)
        second = sum(at(256 + _vgpr(rng), 9 * k) for k in range(3))
        if op == 44:  # the scales of the following product, whose abid selects them
            scales = word | at(rng.randrange(4), 11), second & at(0x3FFFF, 0)
            product = vop3p(rng, rng.choice([45, 46]))
            return [
                scales[0],
                scales[1] | at(rng.randrange(4), 27),
                product[0] | 1 << 11,
                product[1],
            ]
        if op in (45, 46):  # the formats of A and B
            word, second = word | at(rng.randrange(5), 8), second | at(rng.randrange(5), 29)
        if 44 < op < 48 or op >= 53:  # matrix and accumulator operations
            sources = 1 if op == 88 else rng.randrange(4)  # v_accvgpr_read reads there only
            return [word | at(rng.randrange(2), 15), second | at(sources, 27)]
        word |= at(1, 14) | at(rng.randrange(8), 8) | at(rng.randrange(8), 11)
        return [word, second | at(3, 27) | at(rng.randrange(8), 29)]

    def short(first: int, shift: int, wide: bool) -> Sampler:
        def sample(rng: Random, op: int) -> Words:
            compare = first == at(0x3E, 25)
            word = first | at(op, shift) | at(_vgpr(rng), 9) * wide
            return _short_vector(
                rng, word if compare else word | at(_vgpr(rng), 17), False, compare
            )

        return sample

    return {
        "SOP1": (range(56), _sop1),
        "SOP2": (range(64), _sop2),
        "SOPC": (range(32), _sopc),
        "SOPK": (range(24), _sopk),
        "SOPP": (range(32), _sopp),
        "SMEM": (range(64), smem),
        "VOP1": (range(128), short(at(0x3F, 25), 9, False)),
        "VOP2": (range(62), short(0, 25, True)),
        "VOPC": (range(256), short(at(0x3E, 25), 17, True)),
        "VOP3": (range(896), vop3),
        "VOP3P": (range(128), vop3p),
        "DS": (range(256), ds),
        "FLAT": (range(128), flat(0)),
        "SCRATCH": (range(128), flat(1)),
        "GLOBAL": (range(128), flat(2)),
        "MUBUF": (range(128), mubuf),
    }


class _Plain(Random):
    """A random source that always makes the first choice, so that the functions above return an
    instruction without modifiers: with different VGPRs, s0 and no literal.

    ``kinds``: for each source that may be a vector register, True if it is a scalar register
    instead.
    """

    def __init__(self, kinds: tuple[bool, ...]) -> None:
        super().__init__(0)
        self._kinds, self._source, self._vgpr = kinds, 0, 0

    def randrange(self, stop: int, *_: int) -> int:  # type: ignore[override]
        if stop != _VGPR_STEPS:
            return 0
        self._vgpr += 4
        return self._vgpr % _VGPR_STEPS

    def getrandbits(self, k: int) -> int:
        return 0

    def choice(self, seq: Sequence[Any]) -> Any:
        if len(seq) != _VECTOR_KINDS:
            return seq[0]
        scalar = self._kinds[self._source % len(self._kinds)]
        self._source += 1
        return 0 if scalar else seq[0]


_PLAIN = ((False,), (False, True), (False, True, True), (False, False, True), (True,))


def samples(arch: str, each: int, seed: int = 1) -> Iterator[tuple[str, int, Words]]:
    """(format, opcode, words) for every opcode number of every format.

    For every opcode, an instruction without modifiers comes first, then ``each`` random
    instructions.
    """
    rng = Random(seed)
    formats = _rdna3() if arch.startswith("gfx11") else _cdna()
    for name, (opcodes, sampler) in formats.items():
        for opcode in opcodes:
            for kinds in _PLAIN:
                yield name, opcode, sampler(_Plain(kinds), opcode)
            for _ in range(each):
                yield name, opcode, sampler(rng, opcode)
