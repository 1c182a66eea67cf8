"""Cases and helpers of tests/rocm_emulator/test_defects.py, which other tests use too."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

import kernel_cases
from ark_rocm_emulator import ErrorKind
from kernel_cases import KERNELS

from tests.kept import assemble, to_assembly

CASES = kernel_cases.load_all()
RACE, WAIT = (ErrorKind.RACE,), (ErrorKind.MISSING_WAIT,)
RANGE = (ErrorKind.OUT_OF_BOUNDS, ErrorKind.LDS_RANGE)
UNWRITTEN = (ErrorKind.UNINITIALISED,)
STALE = (ErrorKind.STALE,)
TILE = "transpose_tile"
OPTIONS = ("-O3", "-ffp-contract=off")


@dataclass(frozen=True)
class Defect:
    """A planted defect: one edit of a kernel, or of a function that it calls: match number `nth` of
    `old` is replaced by `new`.

    In machine code, `old` is a regular expression, and matches are counted inside the kernel.
    """

    kernel: str
    description: str
    old: str
    new: str
    kinds: tuple[ErrorKind, ...]
    nth: int = 0
    inside: str = ""
    arch: str = "gfx942"
    machine_code: bool = False


def _no_barrier(kernel: str, description: str, nth: int, inside: str = "") -> Defect:
    return Defect(kernel, description, "__syncthreads();", "", RACE + UNWRITTEN, nth, inside)


def _relaxed(kernel: str, description: str, order: str, nth: int = 0, inside: str = "") -> Defect:
    return Defect(kernel, description, f"__ATOMIC_{order}", "__ATOMIC_RELAXED", RACE, nth, inside)


def _patch(
    kernel: str,
    description: str,
    old: str,
    kinds: tuple[ErrorKind, ...],
    nth: int = 0,
    arch: str = "gfx942",
) -> Defect:
    return Defect(kernel, description, old, "s_nop 0", kinds, nth, "", arch, machine_code=True)


DEFECTS = [
    _no_barrier("block_sum", "barrier after the store", 0),
    _no_barrier("block_sum", "barrier in the loop", 1),
    _no_barrier("softmax_rows", "barrier before LDS is used again", 2),
    _no_barrier("rms_norm", "barrier between waves", 0),
    _no_barrier("block_scan", "barrier in the loop", 1),
    _no_barrier("segmented_scan", "barrier before the write", 1),
    _no_barrier("compact_odd", "barrier after the prefix sum", 1),
    _no_barrier("bitonic_sort", "barrier in the loop", 1),
    _no_barrier("transpose_f32", "barrier before the columns", 0, "transpose_tile"),
    _no_barrier("reverse_dynamic_lds", "barrier before the mirror", 0),
    _no_barrier("stencil_halo", "barrier before the neighbours", 0),
    _no_barrier("gemm_tiled", "barrier after the loads", 0),
    _no_barrier("gemm_tiled", "barrier before the next loads", 1),
    _no_barrier("histogram_lds", "barrier after the zeros", 0),
    _no_barrier("gemm_double_buffered", "barrier in the loop", 1),
    _relaxed("ring_exchange", "release", "RELEASE"),
    Defect(
        "ring_exchange",
        "no wait for the slot",
        "wait_agent(sent + blocks",
        "if (0) wait_agent(sent + blocks",
        RACE,
    ),
    _relaxed("ring_exchange", "acquire", "ACQUIRE", inside="wait_agent"),
    _relaxed("wavefront", "release", "RELEASE"),
    _relaxed("wavefront", "acquire", "ACQUIRE", inside="wait_agent"),
    _relaxed("spin_lock", "unlock", "RELEASE"),
    _relaxed("spin_lock", "lock", "ACQUIRE"),
    _relaxed("single_queues", "the producer's release", "RELEASE"),
    _relaxed("barrier_stencil", "arrival", "ACQ_REL", inside="grid_barrier"),
    _relaxed("last_block_sum", "last arrival", "ACQ_REL"),
    Defect("last_block_sum", "scope", "SCOPE_AGENT", "SCOPE_WORKGROUP", RACE),
    Defect("saxpy", "i <= n", "i < n", "i <= n", RANGE),
    Defect("gemm_naive", "i <= k", "i < k", "i <= k", RANGE),
    Defect("gather_scatter", "n - i", "n - 1 - i", "n - i", RANGE),
    Defect("stencil_halo", "a neighbour too far", "line[t + 2]", "line[t + 3]", RANGE),
    Defect("last_block_sum", "b <= blocks", "b < gridDim.x", "b <= gridDim.x", RANGE),
    Defect("collatz", "unwritten memory", "start[i]", "start[i] + (steps[i] & 1)", UNWRITTEN),
    Defect("histogram_lds", "zeros", "local[t] = 0;", "", UNWRITTEN),
    Defect("lds_atomics", "one counter's zero", "mixed = 0;", "", UNWRITTEN),
    Defect("transpose_u8", "padding", "x][threadIdx.y]", "x][threadIdx.y + 1]", UNWRITTEN, 0, TILE),
    Defect("mirror_vector4", "half the lanes' places", "line[t] =", "line[t & 254] =", RACE),
    Defect("transpose_f32", "one place for a row", "rows + to_column]", "rows]", RACE, 0, TILE),
    _patch("saxpy", "wait for the loads", r"s_waitcnt vmcnt\(0\)", WAIT),
    _patch("saxpy", "wait for the arguments", r"s_waitcnt lgkmcnt\(0\)", WAIT),
    _patch("block_sum", "wait for LDS", r"s_waitcnt lgkmcnt\(0\)", WAIT, 2),
    _patch("block_sum", "wait before the barrier", r"s_waitcnt lgkmcnt\(0\)", RACE, 1),
    _patch("mfma_half_32x32", "wait for the operands", r"s_waitcnt vmcnt\(\d\)", WAIT),
    _patch("wavefront", "write-back before the release", r"buffer_wbl2 sc1", RACE),
    _patch("wavefront", "invalidation after the acquire", r"buffer_inv sc1", RACE, 1),
    _patch("wavefront", "wait before the release", r"s_waitcnt vmcnt\(0\)", RACE, 1),
    Defect("saxpy", "beyond the arguments", r"0x18", "0x120", RANGE, machine_code=True),
    _patch("scalar_page", "clearing the scalar cache", r"s_dcache_inv", STALE),
    _patch("scalar_page", "clearing on gfx90a", r"s_dcache_inv", STALE, arch="gfx90a"),
    _patch("scalar_page", "clearing on RDNA", r"s_dcache_inv", STALE, arch="gfx1100"),
    _patch("scalar_page_leader", "the leader's clearing", r"s_dcache_inv", STALE),
    _no_barrier("scalar_page_leader", "barrier after the clearing", 0),
    _patch("scalar_own", "second clearing", r"s_dcache_inv", STALE, 1),
    _patch("saxpy", "wait on RDNA", r"s_waitcnt vmcnt\(0\)", WAIT, arch="gfx1100"),
    _patch("block_sum", "barrier on RDNA", r"s_barrier", RACE + UNWRITTEN, arch="gfx1100"),
    _patch("wavefront", "invalidation on RDNA", r"buffer_gl0_inv", RACE, 1, arch="gfx1100"),
    _patch("wavefront", "invalidation on gfx90a", r"buffer_wbinvl1\w*", RACE, 1, arch="gfx90a"),
]
# Defects between two devices: an edit narrows the scope of a memory operation to its own device.
PUT = "put_signal_wait"
DEVICE_DEFECTS = [
    Defect(PUT, "signal's scope", "__ATOMIC_RELEASE, SYSTEM", "__ATOMIC_RELEASE, AGENT", RACE),
    Defect(PUT, "wait's scope", "ACQUIRE, SYSTEM", "ACQUIRE, AGENT", RACE, inside="wait_system"),
    _relaxed(PUT, "signal's order", "RELEASE"),
    _patch(PUT, "write-back before the signal", r"buffer_wbl2 sc0 sc1", RACE),
    _patch(PUT, "invalidation after the wait", r"buffer_inv sc0 sc1", RACE, 1),
    _patch(PUT, "wait before the signal", r"s_waitcnt vmcnt\(0\)", RACE + WAIT, 1),
    Defect(PUT, "round waited for", "blockIdx.x, r);", "blockIdx.x, r - 1);", RACE + UNWRITTEN),
    Defect(PUT, "wait left out", "wait_system(flag + blockIdx.x, r);", "", RACE + UNWRITTEN),
    Defect(
        PUT,
        "data behind the signal",
        "      wait_system",
        "      peer_inbox[(r & 1) * n + i] = 0; wait_system",
        RACE,
    ),
    Defect(
        PUT,
        "one slot too few",
        "peer_inbox[(r & 1) * n + i]",
        "peer_inbox[n + i]",
        RACE + UNWRITTEN,
    ),
    Defect(
        PUT, "barrier behind the wait", "__syncthreads();", "", RACE + UNWRITTEN, 1, arch="gfx1100"
    ),
    _patch(PUT, "invalidation on RDNA", r"buffer_gl1_inv", RACE, 1, arch="gfx1100"),
]


def _replace_nth(text: str, old: str, new: str, nth: int) -> str:
    places = list(re.finditer(old, text))
    assert len(places) > nth, f"{old} occurs {len(places)} times"
    return text[: places[nth].start()] + new + text[places[nth].end() :]


@lru_cache(maxsize=256)
def broken(defect: Defect) -> bytes:
    """The code object of the kernel's file with the planted defect."""
    file = CASES[defect.kernel].source if defect.kernel in CASES else "sync.hip"
    source = (KERNELS / file).read_text()
    if not defect.machine_code:
        start = re.search(rf"\b{defect.inside or defect.kernel}\(", source)
        assert start
        end = source.index("\n}\n", start.start())
        part = source[start.start() : end]
        edited = _replace_nth(part, re.escape(defect.old), defect.new, defect.nth)
        source = source[: start.start()] + edited + source[end:]
    assembly, _ = to_assembly(source, defect.arch, OPTIONS)
    if defect.machine_code:
        start = re.search(rf"^{defect.kernel}:", assembly, re.MULTILINE)
        assert start
        end = assembly.index(".Lfunc_end", start.start())
        part = assembly[start.start() : end]
        edited = _replace_nth(part, defect.old, defect.new, defect.nth)
        assembly = assembly[: start.start()] + edited + assembly[end:]
    return assemble(assembly, defect.arch)
