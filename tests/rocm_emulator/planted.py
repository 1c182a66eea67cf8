"""Defects that tests plant in correct programs (planted_programs.py): each is an edit of the source
or of the machine code, with a list of the architectures on which the edit is harmless.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from checks_bench import ALL
from planted_programs import PROGRAMS, Program

from tests.kept import to_assembly

CDNA = ("gfx90a", "gfx942", "gfx950")
IN_ORDER = "stores write through, and the barrier's own fence waits for them"
VALUE = "what is stored depends on the flag's value, and so on the loads that came before it"
NOTHING = "the wave stored nothing itself; what it acquired has been written back by its writer"
WHOLE_WAVE = "a wave of 64 lanes adds for both of its halves at once"
WAITED = "the fence waits until the store has arrived, and coherent loads pass the caches by"


@dataclass(frozen=True)
class Defect:
    """A defect: match number `nth` of `old` is replaced by `new`. In machine code, `old` is a
    regular expression.

    archs: the architectures on which the defect is planted. sound: architectures on which the ISA
    makes the edit harmless, with the reason.
    """

    program: str
    edit: str
    old: str
    new: str
    nth: int = 0
    machine_code: bool = False
    archs: tuple[str, ...] = ALL
    sound: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The case's name for pytest."""
        return f"{self.program}-{self.edit}".replace(" ", "_")

    def assembly(self, arch: str) -> str:
        """Returns the assembler text of its program with the defect planted."""
        return assembly(PROGRAMS[self.program], arch, self)


def _edited(text: str, defect: Defect) -> str:
    pattern = defect.old if defect.machine_code else re.escape(defect.old)
    places = list(re.finditer(pattern, text))
    assert len(places) > defect.nth, f"{defect.name}: {defect.old} occurs {len(places)} times"
    at = places[defect.nth]
    return text[: at.start()] + defect.new + text[at.end() :]


def assembly(program: Program, arch: str, defect: Defect | None = None) -> str:
    """A program's assembler text, correct or with a defect."""
    source = program.source()
    head, mark, body = source.partition("void planted(")
    if defect and not defect.machine_code:
        source = head + mark + _edited(body, defect)
    text = to_assembly(source, arch, ("-O3",))[0]
    return _edited(text, defect) if defect and defect.machine_code else text


def _d(program: str, edit: str, old: str, new: str, nth: int = 0, **more: object) -> Defect:
    return Defect(program, edit, old, new, nth, **more)  # type: ignore[arg-type]


def _m(
    program: str, edit: str, old: str, new: str = "s_nop 0", nth: int = 0, **more: object
) -> Defect:
    return Defect(program, edit, old, new, nth, machine_code=True, **more)  # type: ignore[arg-type]


def _orders(program: str, nth: int = 0, drained: bool = True) -> list[Defect]:
    """Returns two defects of a program: in one its release becomes a relaxed operation, in the
    other its acquire number `nth` does. drained: True if a barrier that waits for all stores
    immediately precedes the release.
    """
    sound = {"gfx1100": IN_ORDER} if drained else {}
    return [
        _d(program, "release relaxed", "RELEASE", "RELAXED", sound=sound),
        _d(program, "acquire relaxed", "ACQUIRE", "RELAXED", nth),
    ]


def _all(reason: str) -> dict[str, str]:
    return dict.fromkeys(ALL, reason)


DEFECTS: list[Defect] = [
    *_orders("message"),
    *_orders("message_system"),
    *_orders("message_add"),
    *_orders("message_swap"),
    *_orders("message_polled_by_adds"),
    *_orders("message_flag_of_64_bits"),
    *_orders("message_flag_of_16_bits"),
    *_orders("message_to_three"),
    *_orders("message_from_three"),
    *_orders("message_of_old_line", 1),
    *_orders("chain"),
    *_orders("chain_of_values"),
    *_orders("two_slots", 1),
    *_orders("flag_reset", 1),
    *_orders("spin_lock", drained=False),
    *_orders("ticket_lock", drained=False),
    *_orders("grid_barrier"),
    *_orders("published_pointer"),
    *_orders("waves_release", drained=False),
    *_orders("neighbouring_bytes"),
    _d("message", "data behind the flag", "d[t] = r + t + 1; BARRIER; if (t == 0) { STORE(f, 1u, RELEASE, AGENT); }",
       "if (t == 0) { STORE(f, 1u, RELEASE, AGENT); } BARRIER; d[t] = r + t + 1;"),
    _d("message", "data read ahead of the wait", "if (t == 0) { WAIT(f, 1u, ACQUIRE, AGENT); } BARRIER; BAD(d[t] != r + t + 1);",
       "u32 early = d[t]; KEEP; if (t == 0) { WAIT(f, 1u, ACQUIRE, AGENT); } BARRIER; BAD(early != r + t + 1);"),
    _d("message", "no wait", "WAIT(f, 1u, ACQUIRE, AGENT);", ""),
    _d("message", "wait for too little", "WAIT(f, 1u,", "WAIT(f, 0u,"),
    _d("message", "wait for another flag", "WAIT(f, 1u,", "WAIT(f + 64, 0u,"),
    _d("message", "release of the group", "RELEASE, AGENT", "RELEASE, GROUP", sound={"gfx1100": IN_ORDER}),
    _d("message", "acquire of the group", "ACQUIRE, AGENT", "ACQUIRE, GROUP"),
    _d("message_fences", "no release fence", 'FENCE(RELEASE, "agent");', "KEEP;", sound={"gfx1100": IN_ORDER}),
    _d("message_fences", "no acquire fence", 'FENCE(ACQUIRE, "agent");', "KEEP;"),
    _d("message_fences", "release fence behind the flag", 'FENCE(RELEASE, "agent"); STORE(f, 1u, RELAXED, AGENT);',
       'STORE(f, 1u, RELAXED, AGENT); FENCE(RELEASE, "agent");', sound={"gfx1100": IN_ORDER}),
    _d("message_fences", "acquire fence ahead of the wait", 'WAIT(f, 1u, RELAXED, AGENT); FENCE(ACQUIRE, "agent");',
       'FENCE(ACQUIRE, "agent"); WAIT(f, 1u, RELAXED, AGENT);'),
    _d("message_fences", "release fence of the group", 'RELEASE, "agent"', 'RELEASE, "workgroup"', sound={"gfx1100": IN_ORDER}),
    _d("message_fences", "acquire fence of the group", 'ACQUIRE, "agent"', 'ACQUIRE, "workgroup"'),
    _d("message_from_three", "counts to two", "WAIT(f, 3u", "WAIT(f, 2u"),
    _d("release_sequence", "a store breaks the sequence", "ADD(f, 1u, RELAXED, AGENT);", "STORE(f, 2u, RELAXED, AGENT);"),
    _d("release_sequence", "acquire relaxed", "ACQUIRE", "RELAXED"),
    _d("chain", "second release relaxed", "RELEASE", "RELAXED", 1, sound=_all(NOTHING)),
    _d("chain", "second acquire relaxed", "ACQUIRE", "RELAXED", 1),
    _d("slot_again", "no wait before the slot is used again", "if (t == 0) WAIT(f + 64, 1u, ACQUIRE, AGENT); BARRIER; d[t] = 0;", "d[t] = 0;"),
    _d("slot_again", "given back before it was read", "BAD(d[t] != r + t + 1); BARRIER; if (t == 0) STORE(f + 64, 1u, RELEASE, AGENT);",
       "if (t == 0) STORE(f + 64, 1u, RELEASE, AGENT); KEEP; BAD(d[t] != r + t + 1);"),
    _d("two_slots", "the writer's acquire relaxed", "ACQUIRE", "RELAXED", sound=_all(VALUE)),
    _d("flag_reset", "the writer's acquire relaxed", "ACQUIRE", "RELAXED", sound=_all(VALUE)),
    _d("message_of_old_line", "the writer's acquire relaxed", "ACQUIRE", "RELAXED", sound=_all(VALUE)),
    _d("two_slots", "one slot ahead too far", "r > 1) WAIT(all + 64, r - 1", "r > 2) WAIT(all + 64, r - 2"),
    _d("packets", "value and epoch in two stores", "STORE((u64*)d + t, (u64)(r + 1) << 32 | (r + t), RELAXED, AGENT);",
       "STORE(d + 2 * t + 1, r + 1, RELAXED, AGENT); KEEP; PAUSE; STORE(d + 2 * t, r + t, RELAXED, AGENT);"),
    _d("packets", "the epoch is not compared", "!= r + 1) {}", "> r + 1) {}"),
    _d("counter", "lost additions", "ADD(d, 1u, RELAXED, AGENT);", "STORE(d, LOAD(d, RELAXED, AGENT) + 1, RELAXED, AGENT);"),
    _d("dekker", "release and acquire alone", "SEQ_CST, AGENT); if (LOAD(f + 64 * 1, SEQ_CST", "RELEASE, AGENT); if (LOAD(f + 64 * 1, ACQUIRE"),
    _d("dekker", "relaxed", "SEQ_CST, AGENT); if (LOAD(f + 64 * 1, SEQ_CST", "RELAXED, AGENT); if (LOAD(f + 64 * 1, RELAXED"),
    _d("dekker_fences", "no fence", 'FENCE(SEQ_CST, "agent");', "KEEP;"),
    _d("dekker_fences", "fence of the group", 'SEQ_CST, "agent"', 'SEQ_CST, "workgroup"', sound={"gfx1100": WAITED}),
    _d("dekker_fences", "release fence", 'SEQ_CST, "agent"', 'RELEASE, "agent"', sound=_all(WAITED)),
    _d("dekker_fences", "acquire fence", 'SEQ_CST, "agent"', 'ACQUIRE, "agent"', sound=_all(WAITED)),
    _d("dekker_fences", "fence ahead of the store", 'STORE(f + 64 * 0, 1u, RELAXED, AGENT); FENCE(SEQ_CST, "agent");',
       'FENCE(SEQ_CST, "agent"); STORE(f + 64 * 0, 1u, RELAXED, AGENT);'),
    _d("peterson", "turn first", "STORE(all + 64 * 0, 1u, SEQ_CST, AGENT); STORE(all + 128, 1u, SEQ_CST, AGENT);",
       "STORE(all + 128, 1u, SEQ_CST, AGENT); PAUSE; STORE(all + 64 * 0, 1u, SEQ_CST, AGENT);"),
    _d("peterson", "left relaxed", "STORE(all + 64 * 0, 0u, SEQ_CST", "STORE(all + 64 * 0, 0u, RELAXED"),
    _d("spin_lock", "tested, then set", "SWAP(all, 1u, ACQUIRE, AGENT)", "(LOAD(all, ACQUIRE, AGENT) || (STORE(all, 1u, RELAXED, AGENT), false))"),
    _d("spin_lock", "left too early", "words[0] = seen + 1; STORE(all, 0u, RELEASE, AGENT);", "STORE(all, 0u, RELEASE, AGENT); words[0] = seen + 1;"),
    _d("last_of_all", "arrival relaxed", "ACQ_REL", "RELAXED"),
    _d("last_of_all", "arrival without acquire", "ACQ_REL", "RELEASE"),
    _d("last_of_all", "arrival without release", "ACQ_REL", "ACQUIRE", sound={"gfx1100": IN_ORDER}),
    _d("last_of_all", "the last but one", "== 2;", "== 1;"),
    _d("grid_barrier", "one arrival too few", "WAIT(f, 3u", "WAIT(f, 2u"),
    _d("waves_drain", "stores not drained ahead of the barrier", "DRAIN; BARRIER;", "BARRIER;", sound={"gfx1100": IN_ORDER}),
    _d("waves_release", "one wave is not waited for", "WAIT(f, 8u", "WAIT(f, 6u"),
    _d("lds_barrier", "no barrier behind the store", "BARRIER;", "KEEP;"),
    _d("lds_barrier", "no barrier ahead of the next store", "BARRIER;", "KEEP;", 1),
    _d("lds_two_halves", "one half for both", "256 * (r & 1)", "0 * (r & 1)"),
    _d("lds_tree", "no barrier in the loop", "BARRIER; }", "KEEP; }"),
    _d("lds_atomics", "no zero", "if (t == 0) s[0] = 0;", ""),
    _d("lds_atomics", "no barrier behind the zero", "s[0] = 0; BARRIER;", "s[0] = 0;"),
    _d("lds_atomics", "an addition that is none", "ADD(s, 1u, RELAXED, GROUP);", "s[0] = s[0] + 1;"),
    _d("lds_flag", "no wait", "WAIT(s, 2u * r + 2u, ACQUIRE, GROUP);", ""),
    _d("lds_flag", "one wave is not waited for", "2u * r + 2u", "2u * r + 1u", sound=dict.fromkeys(CDNA, WHOLE_WAVE)),
    _d("lds_columns", "columns overlap", "33 * (t / 16) + t % 16", "15 * (t / 16) + t % 16"),
    _d("global_in_group", "no barrier", "BARRIER;", "KEEP;"),
    _d("global_in_group_again", "no barrier ahead of the next store", "BARRIER;", "KEEP;", 1),
    _d("sequence_lock", "no second look", "while (a != b || a & 1)", "while (a & 1)"),
    _d("sequence_lock", "odd value not looked at", "|| a & 1", ""),
    _d("neighbouring_halves", "both write one half", "((u16*)d)[2 * t + 1] =", "((u16*)d)[2 * t + 0] ="),
    _m("message", "no wait ahead of the release", r"s_waitcnt vmcnt\(0\)(?=[^A]*?global_store_dword [^\n]*sc1)", archs=("gfx942", "gfx950")),
    _m("message", "no write-back", r"buffer_wbl2 sc1", archs=("gfx942", "gfx950")),
    _m("message", "no invalidation on CDNA 3", r"buffer_inv sc1", archs=("gfx942", "gfx950")),
    _m("message", "no invalidation on MI200", r"buffer_wbinvl1\w*", archs=("gfx90a",)),
    _m("message_all_lanes_poll", "no invalidation", r"(?<=buffer_gl1_inv\n\t)buffer_gl0_inv", archs=("gfx1100",)),
    _m("message_all_lanes_poll", "no outer invalidation", r"buffer_gl1_inv", archs=("gfx1100",)),
    _m("message", "no outer invalidation", r"buffer_gl1_inv", archs=("gfx1100",)),
]  # fmt: skip
