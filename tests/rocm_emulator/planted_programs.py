"""Small correct programs that pass data between workgroups, waves and lanes. Tests plant defects in
them (planted.py) and check that the unedited programs are not reported.

A program is a list of statements for each workgroup (a role). Its text may use these names: `t` is
the lane, `n` the number of lanes of a workgroup, `r` the round, `f` the flags and `d` the data of
the round (zeroed before the launch), `all` the flags of all rounds. BAD(x) counts a wrong value.
"""

from __future__ import annotations

from dataclasses import dataclass

FEWEST_ROUNDS = 12
FLAG_WORDS, DATA_WORDS = 512, 1024  # of a round
HEAD = """
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM
#define GROUP __HIP_MEMORY_SCOPE_WORKGROUP
#define LOAD(p, order, scope) __hip_atomic_load(p, __ATOMIC_##order, scope)
#define STORE(p, v, order, scope) __hip_atomic_store(p, v, __ATOMIC_##order, scope)
#define ADD(p, v, order, scope) __hip_atomic_fetch_add(p, v, __ATOMIC_##order, scope)
#define SWAP(p, v, order, scope) __hip_atomic_exchange(p, v, __ATOMIC_##order, scope)
#define FENCE(order, scope) __builtin_amdgcn_fence(__ATOMIC_##order, scope)
#define WAIT(p, v, order, scope) while (LOAD(p, order, scope) < (v)) __builtin_amdgcn_s_sleep(1)
#define BARRIER __syncthreads()
#define BAD(x) if (x) __hip_atomic_fetch_add(wrong, 1u, __ATOMIC_RELAXED, AGENT)
#define KEEP asm volatile("" ::: "memory")
#define PAUSE asm volatile(".rept 12\\ns_nop 0\\n.endr" ::: "memory")
#if defined(__GFX9__)
#define DRAIN asm volatile("s_waitcnt vmcnt(0)" ::: "memory")
#else
#define DRAIN asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory")
#endif
typedef unsigned u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;
static __device__ __forceinline__ void meet(u32* counter, u32 until) {
  ADD(counter, 1u, RELAXED, AGENT);
  while (LOAD(counter, RELAXED, AGENT) < until) {
  }
}
"""


@dataclass(frozen=True)
class Program:
    """roles: the statements of each workgroup. lanes: the number of lanes of a workgroup. before:
    declarations in the kernel, for example of LDS. meets: True if workgroups synchronise, without
    memory order, at the start of each round. rounds: the number of rounds; it is larger for
    programs in which a defect has a visible effect only seldom.
    """

    roles: tuple[str, ...]
    lanes: int = 64
    before: str = ""
    meets: bool = True
    rounds: int = FEWEST_ROUNDS

    def source(self) -> str:
        """The program as HIP source."""
        cases = "\n".join(
            f"      if (blockIdx.x == {k}u) {{ {body} }}" for k, body in enumerate(self.roles)
        )
        meeting = (
            f"if (t == 0) meet(counter, {len(self.roles)}u * (r + 1)); BARRIER;"
            if self.meets
            else ""
        )
        return f"""{HEAD}
extern "C" __global__ __launch_bounds__(256) void planted(u32* all, u32* words, u32* counter,
                                                          u32* wrong) {{
  {self.before}
  u32 t = threadIdx.x, n = blockDim.x;
  for (u32 r = 0; r < {self.rounds}u; ++r) {{
    u32 *f = all + {FLAG_WORDS}u * r, *d = words + {DATA_WORDS}u * r;
    (void)f; (void)d; (void)t; (void)n;
    {meeting}
{cases}
  }}
}}
"""


PUT = "d[t] = r + t + 1; BARRIER; if (t == 0) "
GOT = "BAD(d[t] != r + t + 1);"


def _message(signal: str, wait: str, lanes: int = 64) -> Program:
    """Workgroup 0 stores its data and signals; workgroup 1 waits and reads them."""
    return Program((f"{PUT}{{ {signal} }}", f"if (t == 0) {{ {wait} }} BARRIER; {GOT}"), lanes)


LOCAL = "__shared__ u32 s[1024];"
PROGRAMS: dict[str, Program] = {
    "message": _message("STORE(f, 1u, RELEASE, AGENT);", "WAIT(f, 1u, ACQUIRE, AGENT);"),
    "message_system": _message("STORE(f, 1u, RELEASE, SYSTEM);", "WAIT(f, 1u, ACQUIRE, SYSTEM);"),
    "message_fences": _message(
        'FENCE(RELEASE, "agent"); STORE(f, 1u, RELAXED, AGENT);',
        'WAIT(f, 1u, RELAXED, AGENT); FENCE(ACQUIRE, "agent");',
    ),
    "message_add": _message("ADD(f, 1u, RELEASE, AGENT);", "WAIT(f, 1u, ACQUIRE, AGENT);"),
    "message_swap": _message("SWAP(f, 1u, RELEASE, AGENT);", "WAIT(f, 1u, ACQUIRE, AGENT);"),
    "message_polled_by_adds": _message(
        "ADD(f, 1u, RELEASE, AGENT);", "while (ADD(f, 0u, ACQUIRE, AGENT) < 1u) {}"
    ),
    "message_flag_of_64_bits": _message(
        "STORE((u64*)f, (u64)1 << 40, RELEASE, AGENT);",
        "while (LOAD((u64*)f, ACQUIRE, AGENT) == 0) {}",
    ),
    "message_flag_of_16_bits": _message(
        "STORE((u16*)f + 1, (u16)1, RELEASE, AGENT);",
        "while (LOAD((u16*)f + 1, ACQUIRE, AGENT) == 0) {}",
    ),
    "message_all_lanes_poll": Program(
        (f"{PUT} STORE(f, 1u, RELEASE, AGENT);", f"WAIT(f, 1u, ACQUIRE, AGENT); {GOT}")
    ),
    "message_of_old_line": Program(
        (
            "if (t == 0) WAIT(f + 64, 1u, ACQUIRE, AGENT); BARRIER; "
            f"{PUT} STORE(f, 1u, RELEASE, AGENT);",
            "BAD(d[t] != 0); BARRIER; if (t == 0) STORE(f + 64, 1u, RELEASE, AGENT); KEEP; "
            f"if (t == 0) WAIT(f, 1u, ACQUIRE, AGENT); BARRIER; {GOT}",
        )
    ),
    "message_to_three": Program(
        (
            f"{PUT} STORE(f, 1u, RELEASE, AGENT);",
            *(f"if (t == 0) WAIT(f, 1u, ACQUIRE, AGENT); BARRIER; {GOT}",) * 3,
        )
    ),
    "message_from_three": Program(
        (
            *(
                "d[64 * blockIdx.x + t] = r + t + blockIdx.x; BARRIER; "
                "if (t == 0) ADD(f, 1u, RELEASE, AGENT);",
            )
            * 3,
            "if (t == 0) WAIT(f, 3u, ACQUIRE, AGENT); BARRIER; "
            "for (u32 b = 0; b < 3; ++b) BAD(d[64 * b + t] != r + t + b);",
        )
    ),
    "release_sequence": Program(
        (
            f"{PUT} STORE(f, 1u, RELEASE, AGENT);",
            "if (t == 0) { WAIT(f, 1u, RELAXED, AGENT); ADD(f, 1u, RELAXED, AGENT); }",
            f"if (t == 0) WAIT(f, 2u, ACQUIRE, AGENT); BARRIER; {GOT}",
        )
    ),
    "chain": Program(
        (
            f"{PUT} STORE(f, 1u, RELEASE, AGENT);",
            "if (t == 0) { WAIT(f, 1u, ACQUIRE, AGENT); STORE(f + 64, 1u, RELEASE, AGENT); }",
            f"if (t == 0) WAIT(f + 64, 1u, ACQUIRE, AGENT); BARRIER; {GOT}",
        )
    ),
    "chain_of_values": Program(
        (
            f"{PUT} STORE(f, 1u, RELEASE, AGENT);",
            "if (t == 0) WAIT(f, 1u, ACQUIRE, AGENT); BARRIER; d[64 + t] = d[t] + 1; BARRIER; "
            "if (t == 0) STORE(f + 64, 1u, RELEASE, AGENT);",
            "if (t == 0) WAIT(f + 64, 1u, ACQUIRE, AGENT); BARRIER; BAD(d[64 + t] != r + t + 2); "
            + GOT,
        )
    ),
    "slot_again": Program(
        (
            f"{PUT} STORE(f, 1u, RELEASE, AGENT); "
            "if (t == 0) WAIT(f + 64, 1u, ACQUIRE, AGENT); BARRIER; d[t] = 0;",
            f"if (t == 0) WAIT(f, 1u, ACQUIRE, AGENT); BARRIER; {GOT} BARRIER; "
            "if (t == 0) STORE(f + 64, 1u, RELEASE, AGENT);",
        )
    ),
    "two_slots": Program(
        (
            "if (t == 0 && r > 1) WAIT(all + 64, r - 1, ACQUIRE, AGENT); BARRIER; "
            "words[64 * (r & 1) + t] = r + t; BARRIER; if (t == 0) STORE(all, r + 1, RELEASE, AGENT);",
            "if (t == 0) WAIT(all, r + 1, ACQUIRE, AGENT); BARRIER; "
            "BAD(words[64 * (r & 1) + t] != r + t); BARRIER; "
            "if (t == 0) STORE(all + 64, r + 1, RELEASE, AGENT);",
        ),
        meets=False,
    ),
    "flag_reset": Program(
        (
            "if (t == 0) while (LOAD(all, ACQUIRE, AGENT) != 0) {} BARRIER; words[t] = r + t; "
            "BARRIER; if (t == 0) STORE(all, 1u, RELEASE, AGENT);",
            "if (t == 0) while (LOAD(all, ACQUIRE, AGENT) != 1) {} BARRIER; "
            "BAD(words[t] != r + t); BARRIER; if (t == 0) STORE(all, 0u, RELEASE, AGENT);",
        ),
        meets=False,
    ),
    "packets": Program(
        (
            "STORE((u64*)d + t, (u64)(r + 1) << 32 | (r + t), RELAXED, AGENT);",
            "u64 got; while ((u32)((got = LOAD((u64*)d + t, RELAXED, AGENT)) >> 32) != r + 1) {} "
            "BAD((u32)got != r + t);",
        )
    ),
    "relaxed_data": Program(
        (
            "STORE(d + t, r + 1, RELAXED, AGENT);",
            "u32 got = LOAD(d + t, RELAXED, AGENT); BAD(got != 0 && got != r + 1);",
        )
    ),
    "counter": Program(
        (
            *("ADD(d, 1u, RELAXED, AGENT); if (t == 0) ADD(f, 1u, RELEASE, AGENT);",) * 2,
            "if (t == 0) { WAIT(f, 2u, ACQUIRE, AGENT); BAD(LOAD(d, RELAXED, AGENT) < 2); }",
        )
    ),
    "dekker": Program(
        tuple(
            f"if (t == 0) {{ STORE(f + 64 * {me}, 1u, SEQ_CST, AGENT); "
            f"if (LOAD(f + 64 * {1 - me}, SEQ_CST, AGENT) == 0) "
            "BAD(ADD(d, 1u, RELAXED, AGENT) != 0); }"
            for me in (0, 1)
        ),
        rounds=100,
    ),
    "dekker_fences": Program(
        tuple(
            f"if (t == 0) {{ STORE(f + 64 * {me}, 1u, RELAXED, AGENT); FENCE(SEQ_CST, \"agent\"); "
            f"if (LOAD(f + 64 * {1 - me}, RELAXED, AGENT) == 0) "
            "BAD(ADD(d, 1u, RELAXED, AGENT) != 0); }"
            for me in (0, 1)
        ),
        rounds=100,
    ),
    "peterson": Program(
        tuple(
            f"if (t == 0) {{ STORE(all + 64 * {me}, 1u, SEQ_CST, AGENT); "
            f"STORE(all + 128, {1 - me}u, SEQ_CST, AGENT); "
            f"while (LOAD(all + 64 * {1 - me}, SEQ_CST, AGENT) && "
            f"LOAD(all + 128, SEQ_CST, AGENT) == {1 - me}u) {{}} "
            "u32 inside = ADD(all + 192, 1u, RELAXED, AGENT); BAD(inside != 0); words[0] += 1; "
            "PAUSE; ADD(all + 192, ~0u, RELAXED, AGENT); "
            f"STORE(all + 64 * {me}, 0u, SEQ_CST, AGENT); }}"
            for me in (0, 1)
        ),
        meets=False,
    ),
    "spin_lock": Program(
        (
            "if (t == 0) { while (SWAP(all, 1u, ACQUIRE, AGENT)) {} "
            "u32 seen = words[0]; PAUSE; words[0] = seen + 1; STORE(all, 0u, RELEASE, AGENT); "
            f"if (ADD(all + 64, 1u, ACQ_REL, AGENT) == {3 * FEWEST_ROUNDS - 1}u) "
            f"BAD(words[0] != {3 * FEWEST_ROUNDS}u); }}",
        )
        * 3,
        meets=False,
    ),
    "ticket_lock": Program(
        (
            "if (t == 0) { u32 mine = ADD(all, 1u, RELAXED, AGENT); "
            "while (LOAD(all + 64, ACQUIRE, AGENT) != mine) {} BAD(words[0] != mine); "
            "words[0] = mine + 1; STORE(all + 64, mine + 1, RELEASE, AGENT); }",
        )
        * 3,
        meets=False,
    ),
    "last_of_all": Program(
        (
            "d[64 * blockIdx.x + t] = r + t; BARRIER; __shared__ u32 last; "
            "if (t == 0) last = ADD(f, 1u, ACQ_REL, AGENT) == 2; BARRIER; "
            "if (last) for (u32 b = 0; b < 3; ++b) BAD(d[64 * b + t] != r + t); BARRIER;",
        )
        * 3
    ),
    "grid_barrier": Program(
        (
            "d[64 * blockIdx.x + t] = r + t; BARRIER; "
            "if (t == 0) { ADD(f, 1u, RELEASE, AGENT); WAIT(f, 3u, ACQUIRE, AGENT); } BARRIER; "
            "BAD(d[64 * ((blockIdx.x + 1) % 3) + t] != r + t);",
        )
        * 3
    ),
    "published_pointer": Program(
        (
            "d[64 + t] = r + t + 1; BARRIER; "
            "if (t == 0) STORE((u64*)f, (u64)(d + 64), RELEASE, AGENT);",
            "u64 at; while ((at = LOAD((u64*)f, ACQUIRE, AGENT)) == 0) {} "
            "BAD(((u32*)at)[t] != r + t + 1);",
        )
    ),
    "neighbouring_bytes": Program(
        tuple(
            f"((u8*)d)[4 * t + {k}] = (u8)(r + t + {k}); BARRIER; "
            "if (t == 0) { ADD(f, 1u, RELEASE, AGENT); WAIT(f, 2u, ACQUIRE, AGENT); } BARRIER; "
            f"BAD(((u8*)d)[4 * t + {1 - k}] != (u8)(r + t + {1 - k}));"
            for k in (0, 1)
        )
    ),
    "neighbouring_halves": Program(
        tuple(
            f"((u16*)d)[2 * t + {k}] = (u16)(r + t + {k}); BARRIER; "
            "if (t == 0) { ADD(f, 1u, RELEASE, AGENT); WAIT(f, 2u, ACQUIRE, AGENT); } BARRIER; "
            f"BAD(((u16*)d)[2 * t + {1 - k}] != (u16)(r + t + {1 - k}));"
            for k in (0, 1)
        )
    ),
    "waves_drain": Program(
        (
            "d[t] = r + t + 1; DRAIN; BARRIER; if (t == 0) { FENCE(RELEASE, \"agent\"); DRAIN; "
            "STORE(f, 1u, RELAXED, AGENT); }",
            f"while (LOAD(f, RELAXED, AGENT) == 0) {{}} FENCE(ACQUIRE, \"agent\"); {GOT}",
        ),
        lanes=256,
    ),
    "waves_release": Program(
        (
            "d[t] = r + t + 1; if (t % 32 == 0) ADD(f, 1u, RELEASE, AGENT);",
            f"if (t % 32 == 0) WAIT(f, 8u, ACQUIRE, AGENT); {GOT}",
        ),
        lanes=256,
    ),
    "lds_barrier": Program(("s[t] = r + t; BARRIER; BAD(s[n - 1 - t] != r + n - 1 - t); BARRIER;",), 256, LOCAL, False),
    "lds_two_halves": Program(
        ("u32 h = 256 * (r & 1); s[h + t] = r + t; BARRIER; BAD(s[h + n - 1 - t] != r + n - 1 - t);",),
        256, LOCAL, False,
    ),
    "lds_tree": Program(
        (
            "s[t] = t; BARRIER; for (u32 w = 128; w; w /= 2) { if (t < w) s[t] += s[t + w]; BARRIER; } "
            "BAD(s[0] != 255 * 128); BARRIER;",
        ),
        256, LOCAL, False,
    ),
    "lds_atomics": Program(
        (
            "if (t == 0) s[0] = 0; BARRIER; ADD(s, 1u, RELAXED, GROUP); BARRIER; BAD(s[0] != n); BARRIER;",
        ),
        256, LOCAL, False,
    ),
    "lds_flag": Program(
        (
            "if (t < 64) { s[64 + t] = r + t; if (t % 32 == 0) ADD(s, 1u, RELEASE, GROUP); } "
            "else { WAIT(s, 2u * r + 2u, ACQUIRE, GROUP); BAD(s[t] != r + t - 64); } BARRIER;",
        ),
        128, LOCAL + " if (threadIdx.x == 0) s[0] = 0; BARRIER;", False,
    ),
    "lds_columns": Program(
        (
            "s[33 * (t / 16) + t % 16] = r + t; BARRIER; "
            "BAD(s[33 * (t % 16) + t / 16] != r + 16 * (t % 16) + t / 16); BARRIER;",
        ),
        256, LOCAL, False,
    ),
    "global_in_group": Program(
        ("d[t] = r + t; BARRIER; BAD(d[n - 1 - t] != r + n - 1 - t);",), 256, "", False
    ),
    "global_in_group_again": Program(
        (
            "words[t] = r + t; BARRIER; BAD(words[n - 1 - t] != r + n - 1 - t); BARRIER;",
        ),
        256, "", False,
    ),
    "sequence_lock": Program(
        (
            "if (t == 0) { STORE(all, 2 * r + 1, RELAXED, AGENT); FENCE(RELEASE, \"agent\"); "
            "STORE(words, r, RELAXED, AGENT); STORE(words + 64, r, RELAXED, AGENT); "
            "STORE(all, 2 * r + 2, RELEASE, AGENT); }",
            "if (t == 0) { u32 a, b, x, y; do { a = LOAD(all, ACQUIRE, AGENT); "
            "x = LOAD(words, RELAXED, AGENT); y = LOAD(words + 64, RELAXED, AGENT); "
            "FENCE(ACQUIRE, \"agent\"); b = LOAD(all, RELAXED, AGENT); } while (a != b || a & 1); "
            "BAD(x != y); }",
        ),
        meets=False,
    ),
}  # fmt: skip
