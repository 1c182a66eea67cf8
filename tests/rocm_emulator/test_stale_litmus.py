"""Litmus tests of stale mode: without ordering all outcomes that the memory model allows are seen;
with ordering none of the forbidden ones.

The shapes and their names (message passing, store buffering, load buffering, IRIW, coherence) are
those of Alglave, Maranget and Tautschnig, "Herding Cats" (2014); the allowed outcomes follow from
the C++ memory model, to which LLVM's AMDGPU page maps its code sequences. Each thread is a
workgroup. Each round has separate words and begins at a barrier that orders no memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import checks_bench
import numpy as np
import pytest
from checks_bench import ALL

LITMUS_ROUNDS = 400
MIN_SEEDS, MAX_SEEDS = 3, 24  # minimum number of seeds; more until every allowed outcome was seen
X, Y = 0, 64  # words of one round, in lines of their own
WORD_STRIDE = 128

HEAD = """
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define LOAD(order, at) __hip_atomic_load(w + (at), __ATOMIC_##order, AGENT)
#define STORE(order, at, v) __hip_atomic_store(w + (at), v, __ATOMIC_##order, AGENT)
#define PAUSE asm volatile(".rept 12\\ns_nop 0\\n.endr" ::: "memory")
static __device__ __forceinline__ void meet(unsigned* counter, unsigned until) {
  __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, AGENT);
  while (__hip_atomic_load(counter, __ATOMIC_RELAXED, AGENT) < until) {
  }
}
"""


@dataclass(frozen=True)
class Litmus:
    """A litmus test: the HIP statements of each thread. They report values r0 to r3 by SET.

    `allowed`: the outcomes that the memory model permits. `all_seen`: True if each of them must
    occur.
    """

    threads: tuple[str, ...]
    allowed: frozenset[tuple[int, ...]]
    registers: int = 2
    all_seen: bool = True


def every(registers: int, but: tuple[tuple[int, ...], ...] = ()) -> frozenset[tuple[int, ...]]:
    return frozenset(itertools.product((0, 1), repeat=registers)) - frozenset(but)


def _mp(store: str, load: str, forbidden: bool) -> Litmus:
    return Litmus(
        (f"STORE(RELAXED, {X}, 1u); STORE({store}, {Y}, 1u);",
         f"SET(0, LOAD({load}, {Y})); SET(1, LOAD(RELAXED, {X}));"),
        every(2, ((1, 0),) if forbidden else ()),
    )  # fmt: skip


def _sb(order: str, forbidden: bool) -> Litmus:
    store, load = ("SEQ_CST", "SEQ_CST") if order == "SEQ_CST" else ("RELEASE", "ACQUIRE")
    if order == "RELAXED":
        store = load = "RELAXED"
    return Litmus(
        tuple(f"STORE({store}, {a}, 1u); SET({k}, LOAD({load}, {b}));"
              for k, (a, b) in enumerate(((X, Y), (Y, X)))),
        every(2, ((0, 0),) if forbidden else ()),
    )  # fmt: skip


def _lb(load: str, store: str, forbidden: bool) -> Litmus:
    return Litmus(
        tuple(f"unsigned v = LOAD({load}, {a}); STORE({store}, {b}, 1u); SET({k}, v);"
              for k, (a, b) in enumerate(((X, Y), (Y, X)))),
        every(2, ((1, 1),) if forbidden else ()),
    )  # fmt: skip


def _iriw(order: str, forbidden: bool, all_seen: bool) -> Litmus:
    store = "SEQ_CST" if order == "SEQ_CST" else "RELAXED"
    readers = tuple(
        f"unsigned a = LOAD({order}, {p}); unsigned b = LOAD({order}, {q}); "
        f"PAUSE; SET({2 * k}, a); SET({2 * k + 1}, b);"
        for k, (p, q) in enumerate(((X, Y), (Y, X)))
    )
    return Litmus(
        (f"PAUSE; STORE({store}, {X}, 1u);", f"PAUSE; STORE({store}, {Y}, 1u);", *readers),
        every(4, ((1, 0, 1, 0),) if forbidden else ()),
        4,
        all_seen,
    )


LITMUS = {
    "mp_relaxed": _mp("RELAXED", "RELAXED", False),
    "mp_release_only": _mp("RELEASE", "RELAXED", False),
    "mp_acquire_only": _mp("RELAXED", "ACQUIRE", False),
    "mp_release_acquire": _mp("RELEASE", "ACQUIRE", True),
    "sb_relaxed": _sb("RELAXED", False),
    "sb_release_acquire": _sb("RELEASE", False),
    "sb_seq_cst": _sb("SEQ_CST", True),
    "lb_relaxed": _lb("RELAXED", "RELAXED", False),
    "lb_acquire_release": _lb("ACQUIRE", "RELEASE", True),
    "iriw_relaxed": _iriw("RELAXED", False, True),
    "iriw_seq_cst": _iriw("SEQ_CST", True, False),
    # Accesses to one word: two reads by one thread are never in reverse order, and a thread sees
    # its own store.
    "corr": Litmus(
        (f"STORE(RELAXED, {X}, 1u);",
         f"unsigned a = LOAD(RELAXED, {X}), b = LOAD(RELAXED, {X}); SET(0, a); SET(1, b);"),
        every(2, ((1, 0),)),
    ),
    "cowr": Litmus(
        (f"STORE(RELAXED, {X}, 1u); SET(0, LOAD(RELAXED, {X}));", f"SET(1, LOAD(RELAXED, {X}));"),
        every(2, ((0, 0), (0, 1))),
    ),
    # Data written by plain stores and published by a flag, as in ark's kernels.
    "mp_plain": Litmus(
        (f"w[{X}] = 1; STORE(RELEASE, {Y}, 1u);",
         f"SET(0, LOAD(ACQUIRE, {Y})); if (r[0]) SET(1, w[{X}]); else SET(1, 1u);"),
        frozenset({(0, 1), (1, 1)}),
    ),
}  # fmt: skip


def source(litmus: Litmus, name: str) -> str:
    cases = "".join(f"case {k}: {{ {text} }} break;\n" for k, text in enumerate(litmus.threads))
    return f"""
#define SET(k, v) (r[k] = (v))
extern "C" __global__ void {name}(unsigned* words, unsigned* counter, unsigned* out, long rounds) {{
  if (threadIdx.x != 0) return;
  for (int round = 0; round < rounds; ++round) {{
    unsigned* w = words + round * {WORD_STRIDE};
    meet(counter, (round + 1) * gridDim.x);
    unsigned r[4] = {{7, 7, 7, 7}};
    switch (blockIdx.x) {{ {cases} }}
    for (int k = 0; k < 4; ++k)
      if (r[k] != 7) out[round * 4 + k] = r[k];
  }}
}}
"""


SOURCE = HEAD + "".join(source(litmus, name) for name, litmus in LITMUS.items())


def outcomes(arch: str, name: str, seed: int) -> set[tuple[int, ...]]:
    litmus = LITMUS[name]
    bench = checks_bench.Bench(arch, SOURCE)
    words = bench.buffer(
        np.zeros(LITMUS_ROUNDS * WORD_STRIDE), size=LITMUS_ROUNDS * WORD_STRIDE * 4
    )
    counter = bench.buffer(np.zeros(64))
    out = bench.buffer(np.full(LITMUS_ROUNDS * 4, 9), size=LITMUS_ROUNDS * 16)
    more = {"grid": len(litmus.threads), "seed": seed, "checks": False, "stale": True}
    result = bench.run(name, words, counter, out, LITMUS_ROUNDS, max_slice=8, **more)
    assert result.ok, result.message
    values = np.frombuffer(bench.machine.read(out, LITMUS_ROUNDS * 16), np.uint32).reshape(-1, 4)
    return {tuple(int(v) for v in row[: litmus.registers]) for row in values}


@pytest.mark.parametrize("arch", ALL)
@pytest.mark.parametrize("name", sorted(LITMUS))
def test_outcomes_are_those_that_the_model_allows(name: str, arch: str) -> None:
    litmus, seen = LITMUS[name], set()
    for seed in range(MAX_SEEDS):
        seen |= outcomes(arch, name, seed)
        assert seen <= litmus.allowed, (seed, sorted(seen - litmus.allowed))
        if seed >= MIN_SEEDS and (seen == litmus.allowed or not litmus.all_seen):
            return
    raise AssertionError(
        "outcomes that the memory model allows but that never occurred: "
        f"{sorted(litmus.allowed - seen)}"
    )
