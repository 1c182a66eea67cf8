"""The resources of each AMD target, and the cache operations that its memory model requires.

The lint rules read these values and contain no names of architectures. Register files, LDS sizes
and wave limits are from AMD's ISA guides (CDNA2, CDNA3, CDNA4, RDNA3); the cache operations are
those of the memory model chapters of LLVM's "User Guide for AMDGPU Backend".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SCOPES = ("workgroup", "agent", "system")


@dataclass(frozen=True)
class CacheRules:
    """The instructions and cache bits by which an architecture synchronises at each scope.

    ``acquire[scope]`` and ``release[scope]`` name the caches that an acquire must invalidate and a
    release must write back. ``invalidates`` and ``writes_back`` have these caches for each
    instruction with its cache bits. ``load_scope`` and ``atomic_scope`` give the widest scope at
    which an access with those bits is coherent; a missing entry means workgroup scope.
    ``store_scope`` has the bits that mark a published store. ``exact_bits``: True if the bits
    distinguish agent scope from system scope.
    """

    acquire: Mapping[str, frozenset[str]]
    release: Mapping[str, frozenset[str]]
    invalidates: Mapping[tuple[str, frozenset[str]], frozenset[str]]
    writes_back: Mapping[tuple[str, frozenset[str]], frozenset[str]]
    load_scope: Mapping[frozenset[str], str]
    store_scope: Mapping[frozenset[str], str]
    atomic_scope: Mapping[frozenset[str], str]
    stores_wait_on: str
    exact_bits: bool


@dataclass(frozen=True)
class TargetLimits:
    """The budgets of one architecture: LDS in bytes, and registers per lane of 32 bits each.

    ``private_buffer``: True if private memory is accessed by buffer instructions.
    """

    arch: str
    wave_size: int
    simds_per_cu: int
    waves_per_simd: int
    vgprs_per_simd: int
    vgpr_granule: int
    vgprs_per_wave: int
    lds_per_workgroup: int
    lds_per_cu: int
    lds_granule: int
    unified_accumulators: bool
    private_buffer: bool
    cache: CacheRules


def _bits(*names: str) -> frozenset[str]:
    return frozenset(names)


_CDNA2_CACHE = CacheRules(
    acquire={"workgroup": _bits(), "agent": _bits("l1"), "system": _bits("l1", "l2")},
    release={"workgroup": _bits(), "agent": _bits(), "system": _bits("l2")},
    invalidates={
        ("buffer_wbinvl1_vol", _bits()): _bits("l1"),
        ("buffer_invl2", _bits()): _bits("l2"),
    },
    writes_back={("buffer_wbl2", _bits()): _bits("l2")},
    load_scope={_bits("glc"): "system"},
    store_scope={},
    atomic_scope={_bits(): "system", _bits("glc"): "system"},
    stores_wait_on="vmcnt",
    exact_bits=False,
)

_CDNA3_CACHE = CacheRules(
    acquire={"workgroup": _bits(), "agent": _bits("agent"), "system": _bits("agent", "system")},
    release={"workgroup": _bits(), "agent": _bits("agent"), "system": _bits("agent", "system")},
    invalidates={
        ("buffer_inv", _bits("sc1")): _bits("agent"),
        ("buffer_inv", _bits("sc0", "sc1")): _bits("agent", "system"),
    },
    writes_back={
        ("buffer_wbl2", _bits("sc1")): _bits("agent"),
        ("buffer_wbl2", _bits("sc0", "sc1")): _bits("agent", "system"),
    },
    load_scope={_bits("sc1"): "agent", _bits("sc0", "sc1"): "system"},
    store_scope={_bits("sc1"): "agent", _bits("sc0", "sc1"): "system"},
    atomic_scope={
        _bits(): "agent",
        _bits("sc0"): "agent",
        _bits("sc1"): "system",
        _bits("sc0", "sc1"): "system",
    },
    stores_wait_on="vmcnt",
    exact_bits=True,
)

_RDNA3_CACHE = CacheRules(
    acquire={
        "workgroup": _bits("gl0"),
        "agent": _bits("gl0", "gl1"),
        "system": _bits("gl0", "gl1"),
    },
    release={"workgroup": _bits(), "agent": _bits(), "system": _bits()},
    invalidates={
        ("buffer_gl0_inv", _bits()): _bits("gl0"),
        ("buffer_gl1_inv", _bits()): _bits("gl1"),
    },
    writes_back={},
    load_scope={_bits("glc"): "system", _bits("glc", "dlc"): "system"},
    store_scope={},
    atomic_scope={_bits(): "system", _bits("glc"): "system"},
    stores_wait_on="vscnt",
    exact_bits=False,
)

_BYTES_PER_KIB = 1024


def _cdna(arch: str, lds: int, cache: CacheRules) -> TargetLimits:
    return TargetLimits(
        arch=arch,
        wave_size=64,
        simds_per_cu=4,
        waves_per_simd=8,
        vgprs_per_simd=512,
        vgpr_granule=8,
        vgprs_per_wave=512,
        lds_per_workgroup=lds,
        lds_per_cu=lds,
        lds_granule=512 if lds == 64 * _BYTES_PER_KIB else 1280,
        unified_accumulators=True,
        private_buffer=arch == "gfx90a",
        cache=cache,
    )


TARGETS: Mapping[str, TargetLimits] = {
    "gfx90a": _cdna("gfx90a", 64 * _BYTES_PER_KIB, _CDNA2_CACHE),
    "gfx942": _cdna("gfx942", 64 * _BYTES_PER_KIB, _CDNA3_CACHE),
    "gfx950": _cdna("gfx950", 160 * _BYTES_PER_KIB, _CDNA3_CACHE),
    # clang compiles for work-group processor mode by default, in which the four SIMDs of a
    # work-group processor share 128 KiB of LDS.
    "gfx1100": TargetLimits(
        arch="gfx1100",
        wave_size=32,
        simds_per_cu=4,
        waves_per_simd=16,
        vgprs_per_simd=1536,
        vgpr_granule=24,
        vgprs_per_wave=256,
        lds_per_workgroup=64 * _BYTES_PER_KIB,
        lds_per_cu=128 * _BYTES_PER_KIB,
        lds_granule=1024,
        unified_accumulators=False,
        private_buffer=False,
        cache=_RDNA3_CACHE,
    ),
}
