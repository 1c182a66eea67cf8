"""Whole grids on the emulator core: schedules, waits, deadlocks, several devices, wrong input."""

from __future__ import annotations

import struct
import time
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from ark_rocm_emulator.engine import core
from isa_program import Case, build

from tests.kept import compile_hip

SOURCE = """
#define KERNEL extern "C" __global__ __launch_bounds__(256) void
#define AGENT __HIP_MEMORY_SCOPE_AGENT
#define SYSTEM __HIP_MEMORY_SCOPE_SYSTEM

KERNEL order(unsigned* next, unsigned* log) {
  for (int i = 0; i < 8; ++i)
    if ((threadIdx.x & 63) == 0)
      log[__hip_atomic_fetch_add(next, 1u, __ATOMIC_RELAXED, AGENT)] =
          blockIdx.x * 16 + threadIdx.x / 64;
}

KERNEL squares(unsigned* out) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  __shared__ unsigned tile[256];
  tile[threadIdx.x] = i;
  __syncthreads();
  unsigned j = tile[255 - threadIdx.x];
  out[i] = j * j;
}

KERNEL wait_for(const unsigned* flag, unsigned value, unsigned* out) {
  while (__hip_atomic_load(flag, __ATOMIC_ACQUIRE, SYSTEM) != value) __builtin_amdgcn_s_sleep(1);
  out[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

KERNEL cross_wait(unsigned* flags) {
  unsigned other = 1 - blockIdx.x;
  if (threadIdx.x == 0) {
    while (__hip_atomic_load(flags + other, __ATOMIC_ACQUIRE, AGENT) == 0) {}
    __hip_atomic_store(flags + blockIdx.x, 1u, __ATOMIC_RELEASE, AGENT);
  }
  __syncthreads();
}

KERNEL long_loop(unsigned* out, unsigned n) {
  unsigned x = threadIdx.x;
  for (unsigned i = 0; i < n; ++i) x = x * 1664525u + 1013904223u;
  out[threadIdx.x] = x;
}

KERNEL ping_pong(unsigned* mine, unsigned* theirs, unsigned rank, unsigned rounds, unsigned* log) {
  for (unsigned r = 0; r < rounds; ++r) {
    if (r % 2 == rank) {
      __hip_atomic_store(theirs, r + 1, __ATOMIC_RELEASE, SYSTEM);
    } else {
      while (__hip_atomic_load(mine, __ATOMIC_ACQUIRE, SYSTEM) != r + 1) {}
    }
    log[r] = r;
  }
}

KERNEL store_at(unsigned* out, long at) { out[at] = 1; }
KERNEL bad_from(unsigned* out, unsigned first) {
  out[blockIdx.x >= first ? 1l << 40 : 0] = 1;
}
KERNEL lds_at(unsigned* out, int at) {
  extern __shared__ unsigned tile[];
  out[threadIdx.x] = tile[at];
}
KERNEL trap() { __builtin_trap(); }
// Opcodes that are known by name only: a scalar store, a branch for debuggers.
#if defined(__GFX9__)
KERNEL not_emulated() { asm volatile(".long 0xc0420002, 0"); }
#else
KERNEL not_emulated() { asm volatile("s_cbranch_cdbgsys 0"); }
#endif
KERNEL no_instruction() { asm volatile(".long 0xc7fffff0"); }

__device__ unsigned table[4] = {1, 2, 3, 4};
__device__ unsigned* pointer = table + 2;
KERNEL globals(unsigned* out) { out[0] = *pointer; out[1] = table[blockIdx.x]; }

__device__ __attribute__((noinline)) unsigned fib(unsigned n) {
  return n < 2 ? n : fib(n - 1) + fib(n - 2);
}
KERNEL recursion(unsigned* out) { out[threadIdx.x] = fib(threadIdx.x & 7); }

KERNEL geometry(unsigned* out) {
  unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  unsigned t = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  out[block * blockDim.x * blockDim.y * blockDim.z + t] =
      threadIdx.x | threadIdx.y << 4 | threadIdx.z << 8 | blockIdx.x << 12 | blockIdx.y << 16 |
      blockIdx.z << 20;
}
"""
ARCHS = ("gfx90a", "gfx942", "gfx1100")


@lru_cache(maxsize=8)
def binary(arch: str, option: str = "-O3") -> bytes:
    return compile_hip(SOURCE, arch, (option,))


class Bench:
    """Emulated devices of one architecture, each with the test kernels loaded."""

    def __init__(self, arch: str = "gfx942", devices: int = 1, option: str = "-O3") -> None:
        self.machine = core().Machine([arch] * devices)
        self.code = core().CodeObject(binary(arch, option))
        self.loaded = [self.machine.load(self.code, d) for d in range(devices)]

    def buffer(self, words: int, device: int = 0, kind: str = "device", fill: int = 0) -> int:
        address: int = self.machine.allocate(device, kind, 4 * words, f"buffer {words}")
        self.machine.write(address, np.full(words, fill, np.uint32).tobytes())
        return address

    def words(self, address: int, count: int) -> Any:
        return np.frombuffer(self.machine.read(address, 4 * count), np.uint32)

    def launch(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: bytes,
        device: int = 0,
        dynamic_lds: int = 0,
        **options: Any,
    ) -> Any:
        settings = core().LaunchOptions(**options)
        code = self.loaded[device]
        return core().LaunchDesc(code, kernel, grid, block, arguments, dynamic_lds, settings)

    def run(self, *args: Any, **options: Any) -> Any:
        return self.machine.run(self.launch(*args, **options))


def wave_order(seed: int, max_slice: int = 16) -> tuple[int, ...]:
    bench = Bench()
    log, counter = bench.buffer(256), bench.buffer(1)
    result = bench.run(
        "order", (8, 1, 1), (256, 1, 1), struct.pack("<QQ", counter, log), seed=seed,
        max_slice=max_slice,
    )  # fmt: skip
    assert result.ok, result.message
    return tuple(bench.words(log, 256))


def test_seed_fixes_the_schedule_and_seeds_differ() -> None:
    assert wave_order(1) == wave_order(1)
    orders = {wave_order(seed) for seed in range(6)}
    assert len(orders) == 6
    for order in orders:  # every wave took its eight turns
        waves, turns = np.unique(order, return_counts=True)
        assert list(waves) == sorted(b * 16 + w for b in range(8) for w in range(4))
        assert set(turns) == {8}


@pytest.mark.parametrize("arch", ARCHS)
def test_independent_workgroups_give_the_same_in_parallel_and_checked(arch: str) -> None:
    bench = Bench(arch)
    index = np.arange(64 * 256, dtype=np.uint32)
    mirrored = index.reshape(64, 256)[:, ::-1].reshape(-1)
    counts = set()
    for options in ({"parallel": True}, {"parallel": False}, {"checks": True}):
        out = bench.buffer(64 * 256)
        result = bench.run("squares", (64, 1, 1), (256, 1, 1), struct.pack("<Q", out), **options)
        assert result.ok, result.message
        assert np.array_equal(bench.words(out, 64 * 256), mirrored * mirrored)
        counts.add(result.instructions)
    assert len(counts) == 1


def test_host_ends_a_wait() -> None:
    bench = Bench()
    flag, out = bench.buffer(1, kind="host"), bench.buffer(128)
    arguments = struct.pack("<QI4xQ", flag, 7, out)
    running = bench.machine.launch(bench.launch("wait_for", (2, 1, 1), (64, 1, 1), arguments))
    assert not running.wait_for_ms(300)
    bench.machine.write(flag, struct.pack("<I", 7))
    result = running.wait()
    assert result.ok, result.message
    assert set(bench.words(out, 128)) == {7}


def test_wait_for_the_host_ends_when_its_time_is_over() -> None:
    bench = Bench()
    flag, out = bench.buffer(1, kind="host"), bench.buffer(64)
    result = bench.run(
        "wait_for", (1, 1, 1), (64, 1, 1), struct.pack("<QI4xQ", flag, 7, out),
        external_wait_ms=200,
    )  # fmt: skip
    assert result.kind == "deadlock"
    assert "nothing came from outside" in result.message


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("option", ["-O0", "-O3"])
def test_deadlock_names_every_wave_and_its_polled_address(arch: str, option: str) -> None:
    bench = Bench(arch, option=option)
    flags = bench.buffer(2)
    began = time.monotonic()
    result = bench.run("cross_wait", (2, 1, 1), (256, 1, 1), struct.pack("<Q", flags), seed=5)
    assert time.monotonic() - began < 60
    assert result.kind == "deadlock"
    assert "seed 5" in result.message
    waves = 256 // (32 if arch == "gfx1100" else 64)
    polling = [w for w in result.waves if w.state.startswith("polls")]
    assert {w.workgroup[0] for w in polling} == {0, 1} and len(polling) == 2
    assert all("buffer 2+" in w.state and "= 0" in w.state for w in polling)
    assert sum(w.state == "at barrier" for w in result.waves) == 2 * (waves - 1)
    assert all("cross_wait+0x" in w.function for w in result.waves)


def test_long_computation_is_no_deadlock() -> None:
    bench = Bench()
    out = bench.buffer(64)
    result = bench.run("long_loop", (1, 1, 1), (64, 1, 1), struct.pack("<QI", out, 300_000))
    assert result.ok, result.message


def test_budget_and_a_cancellation_end_a_grid() -> None:
    bench = Bench()
    out = bench.buffer(64)
    arguments = struct.pack("<QI", out, 4_000_000_000)
    result = bench.run("long_loop", (1, 1, 1), (64, 1, 1), arguments, step_budget=100_000)
    assert result.kind == "budget"
    running = bench.machine.launch(bench.launch("long_loop", (1, 1, 1), (64, 1, 1), arguments))
    running.cancel()
    assert running.wait().kind == "cancelled"


def test_memory_of_a_running_grid_is_kept() -> None:
    bench = Bench()
    flag, out = bench.buffer(1, kind="host"), bench.buffer(64)
    arguments = struct.pack("<QI4xQ", flag, 7, out)
    running = bench.machine.launch(bench.launch("wait_for", (1, 1, 1), (64, 1, 1), arguments))
    assert not running.wait_for_ms(50)
    bench.machine.release(flag)  # the memory that the grid polls no longer exists
    assert running.wait().kind == "out of bounds"
    flag = bench.buffer(1, kind="host")
    arguments = struct.pack("<QI4xQ", flag, 7, out)
    running = bench.machine.launch(bench.launch("wait_for", (1, 1, 1), (64, 1, 1), arguments))
    del bench  # the launch keeps the machine alive
    assert not running.wait_for_ms(50)
    running.cancel()
    assert running.wait().kind == "cancelled"


def test_two_devices_answer_each_other_in_one_thread_and_in_two() -> None:
    bench = Bench(devices=2)
    flags = [bench.buffer(1, device=d, kind="fine") for d in range(2)]
    for flag in flags:
        bench.machine.set_access(flag, 3)
    logs = [bench.buffer(16, device=d) for d in range(2)]

    def launches() -> list[Any]:
        for flag in flags:
            bench.machine.write(flag, bytes(4))
        return [
            bench.launch(
                "ping_pong", (1, 1, 1), (1, 1, 1),
                struct.pack("<QQIIQ", flags[d], flags[1 - d], d, 16, logs[d]), device=d,
            )
            for d in range(2)
        ]  # fmt: skip

    counts = []
    for _ in range(2):
        results = bench.machine.run_together(launches(), seed=3)
        assert all(r.ok for r in results), [r.message for r in results]
        counts.append([r.instructions for r in results])
    assert counts[0] == counts[1]  # the same interleaving, to the instruction
    running = [bench.machine.launch(launch) for launch in launches()]
    assert all(r.wait().ok for r in running)
    assert np.array_equal(bench.words(logs[1], 16), np.arange(16))


def test_device_without_access_cannot_use_a_peers_memory() -> None:
    bench = Bench(devices=2)
    theirs = bench.buffer(4, device=1)
    arguments = struct.pack("<Qq", theirs, 0)
    result = bench.run("store_at", (1, 1, 1), (1, 1, 1), arguments)
    assert result.kind == "out of bounds"
    bench.machine.set_access(theirs, 0b11)
    assert bench.run("store_at", (1, 1, 1), (1, 1, 1), arguments).ok


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("at", [-1, 4, 1 << 40])
def test_store_outside_every_allocation_stops_with_its_place(arch: str, at: int) -> None:
    bench = Bench(arch)
    out = bench.buffer(4)
    result = bench.run("store_at", (1, 1, 1), (1, 1, 1), struct.pack("<Qq", out, at))
    assert result.kind == "out of bounds"
    assert result.address == out + 4 * at and result.lane == 0
    assert "store" in result.where.line and "store_at+0x" in result.where.function


def test_lowest_workgroup_at_fault_is_named_whatever_the_threads() -> None:
    bench = Bench()
    out = bench.buffer(4)
    for parallel in (True, False, True):
        arguments = struct.pack("<QI", out, 11)
        result = bench.run("bad_from", (200, 1, 1), (64, 1, 1), arguments, parallel=parallel)
        assert result.kind == "out of bounds" and result.where.workgroup == (11, 0, 0)


def test_registers_of_a_workgroup_do_not_leak_to_the_next() -> None:
    case = Case("v_mov_b32 v40, v100\nv_mov_b32 v100, 1", 0)
    machine = core().Machine(["gfx942"])
    loaded = machine.load(core().CodeObject(build("gfx942", {"stale": case})), 0)
    rows = [machine.allocate(0, "device", 256) for _ in range(2)]
    arguments = struct.pack("<QQ", *rows)
    for parallel in (True, False):
        options = core().LaunchOptions(parallel=parallel)
        launch = core().LaunchDesc(loaded, "stale", (9, 1, 1), (64, 1, 1), arguments, 0, options)
        result = machine.run(launch)
        assert result.ok, result.message
        assert machine.read(rows[1], 256) == bytes(256)


def test_lds_out_of_range_and_a_trap() -> None:
    bench = Bench()
    out = bench.buffer(64)
    inside = bench.run("lds_at", (1, 1, 1), (64, 1, 1), struct.pack("<Qi", out, 15), dynamic_lds=64)
    assert inside.ok, inside.message
    beyond = bench.run("lds_at", (1, 1, 1), (64, 1, 1), struct.pack("<Qi", out, 16), dynamic_lds=64)
    assert beyond.kind == "LDS out of range"
    assert bench.run("trap", (1, 1, 1), (64, 1, 1), b"").kind == "trap"


@pytest.mark.parametrize("arch", ARCHS)
def test_opcode_that_is_not_there_is_named(arch: str) -> None:
    bench = Bench(arch)
    result = bench.run("not_emulated", (1, 1, 1), (64, 1, 1), b"")
    name = "s_cbranch_cdbgsys" if arch == "gfx1100" else "s_store_dword"
    assert result.kind == "unknown opcode"
    assert name in result.message and "not_emulated+0x" in result.message
    assert result.where.line.startswith(name)
    listing = bench.code.disassemble("not_emulated").splitlines()
    (line,) = [text for text in listing if name in text]
    assert int(line.split(":")[0], 16) == result.where.pc
    unknown = bench.run("no_instruction", (1, 1, 1), (64, 1, 1), b"")
    assert unknown.kind == "unknown opcode" and "0xc7fffff0" in unknown.message


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("option", ["-O0", "-O3"])
def test_variables_relocations_calls_and_geometry(arch: str, option: str) -> None:
    bench = Bench(arch, option=option)
    out = bench.buffer(512)
    assert bench.run("globals", (1, 1, 1), (1, 1, 1), struct.pack("<Q", out)).ok
    assert list(bench.words(out, 2)) == [3, 1]
    bench.machine.write(bench.loaded[0].address_of("table"), struct.pack("<4I", 5, 6, 7, 8))
    assert bench.run("globals", (1, 1, 1), (1, 1, 1), struct.pack("<Q", out)).ok
    assert list(bench.words(out, 2)) == [7, 5]
    result = bench.run("recursion", (1, 1, 1), (64, 1, 1), struct.pack("<Q", out))
    assert result.ok, result.message
    assert list(bench.words(out, 8)) == [0, 1, 1, 2, 3, 5, 8, 13]
    assert bench.run("geometry", (2, 3, 2), (3, 7, 2), struct.pack("<Q", out)).ok
    z, y, x, tz, ty, tx = np.indices((2, 3, 2, 2, 7, 3))
    expected = tx | ty << 4 | tz << 8 | x << 12 | y << 16 | z << 20
    assert np.array_equal(bench.words(out, 504), expected.reshape(-1))


def test_launches_that_do_not_fit_are_refused_with_a_reason() -> None:
    bench = Bench()
    out = bench.buffer(64)
    good = struct.pack("<Q", out)
    for block, arguments, lds, words in [
        ((1024, 1, 1), good, 0, "at most 256"),
        ((64, 1, 1), b"", 0, "0 bytes of arguments"),
        ((64, 1, 1), good, 70_000, "65536"),
        ((0, 1, 1), good, 0, "no lanes"),
    ]:
        launch = bench.launch("squares", (1, 1, 1), block, arguments, dynamic_lds=lds)
        result = bench.machine.run(launch)
        assert result.kind == "bad launch" and words in result.message
    missing = bench.machine.run(bench.launch("nothing", (1, 1, 1), (1, 1, 1), b""))
    assert missing.kind == "bad launch" and "nothing" in missing.message


def test_invalid_code_objects_are_refused_with_a_reason() -> None:
    whole = binary("gfx942")
    for data in (b"", b"\x7fELF", b"no", whole[:200], whole[: len(whole) // 2]):
        with pytest.raises(ValueError, match="code object"):
            core().CodeObject(data)
    rng = np.random.default_rng(0)
    for _ in range(200):  # damage must never crash
        damaged = bytearray(whole)
        for at in rng.integers(0, len(whole), 8):
            damaged[at] = int(rng.integers(0, 256))
        try:
            code = core().CodeObject(bytes(damaged))
            code.disassemble()
        except ValueError:
            continue


def test_invalid_machines_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="gfx90a, gfx942"):
        core().Machine(["gfx803"])
    with pytest.raises(ValueError, match="1 to 64"):
        core().Machine([])
    machine = core().Machine(["gfx90a"])
    with pytest.raises(ValueError, match="is for gfx942"):
        machine.load(core().CodeObject(binary("gfx942")), 0)
    with pytest.raises(ValueError, match="device 1 does not exist"):
        machine.allocate(1, "device", 64)
