"""Damaged code objects: a truncated file or a flipped byte gives an error or a loadable object,
never a crash.

Contents of files are not trusted: offsets that wrap around, sizes that no kernel has, relocations
and symbols outside the image. The emulator's core is called directly, then through HIP; the lint is
given damaged assembly.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from functools import lru_cache

import pytest
from ark_rocm_emulator import emulated
from ark_rocm_emulator.engine import core
from ark_rocm_emulator.lint import TARGETS, lint
from hip import hip
from hypothesis import given, settings
from hypothesis import strategies as st
from isa_program import Case, build

from tests.kept import compile_hip, to_assembly

SOURCE = """
__device__ int table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
__device__ int* middle = &table[2];
__device__ __attribute__((noinline)) int far(int x, const int* p) {
  int y[16];
  for (int i = 0; i < 16; ++i) y[i] = p[i] + x;
  return y[x & 15];
}
extern "C" __global__ void one(int* out, const int* in, int n) {
  __shared__ int tile[64];
  tile[threadIdx.x] = in[threadIdx.x] + n + table[n & 7] + *middle;
  __syncthreads();
  out[threadIdx.x] = far(tile[63 - threadIdx.x], in);
}
"""
ERROR = hip.hipError_t
Patch = Callable[[bytearray], None]


@lru_cache(maxsize=1)
def intact() -> bytes:
    return compile_hip(SOURCE, "gfx942", ("-O2",))


@lru_cache(maxsize=1)
def assembly() -> str:
    return to_assembly(SOURCE, "gfx942")[0]


def _try(data: bytes) -> str:
    """Loads, prints and runs the object as far as possible. Returns the outcome in a word. No
    exception other than the core's Error may be raised.
    """
    try:
        code = core().CodeObject(data)
        code.disassemble()
        machine = core().Machine([code.arch])
        loaded = machine.load(code, 0)
        buffer = machine.allocate(0, "device", 4096)
        machine.write(buffer, bytes(4096))
        outcome = "loaded"
        for kernel in code.kernels:
            arguments = struct.pack("<QQi", buffer, buffer, 3)
            options = core().LaunchOptions(seed=1, step_budget=20_000, external_wait_ms=100)
            launch = core().LaunchDesc(loaded, kernel.name, (1, 1, 1), (64, 1, 1), arguments, 0,
                                       options)  # fmt: skip
            outcome = machine.run(launch).kind
        return outcome
    except ValueError as error:  # the core's Error, or that of a name that is not text
        assert str(error)
        return "refused"


def test_intact_object_runs() -> None:
    assert _try(intact()) == "none"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_truncated_objects_are_refused(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, len(intact()) - 1))
    assert _try(intact()[:length]) == "refused"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_flipped_bytes_never_crash(data: st.DataObject) -> None:
    damaged = bytearray(intact())
    any_offset = st.integers(0, len(damaged) - 1)
    headers = st.one_of(st.integers(0, 600), st.integers(len(damaged) - 1300, len(damaged) - 1))
    places = st.lists(st.tuples(st.one_of(any_offset, headers), st.integers(0, 255)), max_size=8)
    for at, value in data.draw(places):
        damaged[at] = value
    _try(bytes(damaged))


def _segment(data: bytearray, wanted: int) -> int:
    """The position of the header of the first segment with these flags (5: code)."""
    (table,) = struct.unpack_from("<Q", data, 0x20)
    size, count = struct.unpack_from("<HH", data, 0x36)
    return next(table + k * size for k in range(count)
                if struct.unpack_from("<II", data, table + k * size) == (1, wanted))  # fmt: skip


def _section(data: bytearray, wanted: int) -> tuple[int, int]:
    """The offset and size of the first section of this type (4: relocations, 11: symbols)."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count = struct.unpack_from("<HH", data, 0x3A)
    for k in range(count):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", data, table + k * size + 4)
        if kind == wanted:
            return offset, length
    raise AssertionError(f"no section of type {wanted}")


def _relocation_that_wraps(data: bytearray) -> None:
    struct.pack_into("<Q", data, _section(data, 4)[0], 2**64 - 4)


def _huge_segment(data: bytearray) -> None:
    struct.pack_into("<Q", data, _segment(data, 5) + 40, 2**30)


def _symbol_outside(data: bytearray) -> None:
    offset, length = _section(data, 11)
    for at in range(offset, offset + length, 24):
        if data[at + 4] & 15 == 1:
            struct.pack_into("<Q", data, at + 16, 2**40)


def _metadata(key: bytes, before: bytes, after: bytes) -> Patch:
    def patch(data: bytearray) -> None:
        at = data.index(key + before)
        data[at + len(key) : at + len(key) + len(before)] = after

    return patch


def _descriptor(offset: int, size: str, value: int) -> Patch:
    def patch(data: bytearray) -> None:
        symbols, length = _section(data, 11)
        for at in range(symbols, symbols + length, 24):
            _, info, _, _, address, extent = struct.unpack_from("<IBBHQQ", data, at)
            if info & 15 == 1 and extent == 64:
                struct.pack_into(size, data, address + offset, value)

    return patch


PATCHES = {
    "relocation": (_relocation_that_wraps, "relocation lies outside the image"),
    "segment": (_huge_segment, "segment is absurd"),
    "symbol": (_symbol_outside, "lies outside the image"),
    "wave size": (
        _metadata(b".wavefront_size", b"\x40", b"\x00"),
        "for waves of 0 in the metadata",
    ),
    "argument": (
        _metadata(b".size", b"\x08", b"\x7f"),
        "an argument of kernel 'one' lies outside",
    ),
    "private memory": (_descriptor(4, "<I", 0x7FFFFFFF), "bytes of private memory a lane"),
    "preload": (_descriptor(58, "<H", 127), "preloaded argument dwords"),
    "entry": (_descriptor(16, "<q", 2), "begins outside the code"),
}


@pytest.mark.parametrize("name", list(PATCHES))
def test_impossible_kernel_descriptors_are_reported(name: str) -> None:
    patch, words = PATCHES[name]
    damaged = bytearray(intact())
    patch(damaged)
    with pytest.raises(core().Error, match=words):
        core().CodeObject(bytes(damaged))


def test_more_registers_than_there_are() -> None:
    data = build("gfx942", {"k": Case("v_mov_b32_e32 v40, v10", 1)})
    at = data.index(b".vgpr_count\xcc\xc0")
    with pytest.raises(core().Error, match="needs 65472 vector registers"):
        core().CodeObject(data[: at + 11] + b"\xcd\xff\xc0" + data[at + 14 :])


@pytest.mark.parametrize("kept", [3, 40, 64, 500, 3000])
def test_hip_refuses_truncated_objects(kept: int) -> None:
    """hipModuleLoadData receives no size, so headers that point to invalid memory must not be
    followed.
    """
    page = mmap.PAGESIZE
    held = mmap.mmap(-1, 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(held))
    # The page behind the data is made inaccessible, so that a read past the last byte is a crash.
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + page), ctypes.c_size_t(page), 0) == 0
    held[page - kept : page] = intact()[:kept]
    with emulated("gfx942"):
        answer = hip.hipModuleLoadData(start + page - kept)
        assert answer[0] == ERROR.hipErrorInvalidImage


@pytest.mark.parametrize("field", [0x20, 0x28])
@pytest.mark.parametrize("value", [2**64 - 8, 2**47, 2**33, 2**31])
def test_hip_refuses_tables_outside_the_process(field: int, value: int) -> None:
    damaged = bytearray(intact())
    struct.pack_into("<Q", damaged, field, value)
    with emulated("gfx942"):
        assert hip.hipModuleLoadData(bytes(damaged))[0] == ERROR.hipErrorInvalidImage


ODD_LINES = (
    "\ts_branch",
    "\ts_waitcnt x",
    "\ts_waitcnt_vscnt",
    "\ts_waitcnt_vscnt null, x",
    "\ts_cbranch_scc0 .Lnowhere",
    "    .vgpr_count: many",
    "\t.amdgpu_metadata",
    "\tglobal_atomic_add sc1",
    "\t; ark.acquire agent",
    ":",
)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_assembly_never_breaks_the_lint(data: st.DataObject) -> None:
    lines = assembly().splitlines()
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(lines) - 1))
        damage = data.draw(st.integers(0, 2))
        if damage == 0:
            lines.insert(at, data.draw(st.sampled_from(ODD_LINES)))
        elif damage == 1:
            lines[at] = lines[at][: data.draw(st.integers(0, len(lines[at])))]
        elif len(lines) > 1:
            del lines[at]
    for arch in ("gfx942", "gfx1100"):
        assert isinstance(lint("\n".join(lines), TARGETS[arch]), list)
