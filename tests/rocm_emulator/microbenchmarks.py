"""Published microbenchmarks of the MI300X, predicted by the timing model: memory and the
memory-side cache, signals and barriers between compute units (also in two levels, first within each
die and then between dies), and matrix units.

Used by test_timing.py, and by ci/timing_errors.py, which writes a table of the results.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from ark_rocm_emulator import emulated
from hip import hip
from hip_runner import Arguments, Buffers, check, download, launch

from tests.kept import compile_hip

COMPUTE_UNITS, DIES = 304, 8
HEAD = """
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
#define KERNEL(n) extern "C" __attribute__((global, amdgpu_flat_work_group_size(n, n))) void
#define BLOCK __builtin_amdgcn_workgroup_id_x()
#define THREAD __builtin_amdgcn_workitem_id_x()
#define LOAD(p) __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#define STORE(p, v) __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
#define CLOCK __builtin_readsteadycounter()  // of 10 ns
#define ADD(p) __hip_atomic_fetch_add(p, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)
"""
SOURCE = """
// Each block sums `each` times 8 KB of its own.
KERNEL(512) stream(const f32x4* from, float* to, int each) {
  const f32x4* p = from + static_cast<long>(BLOCK) * each * 512 + THREAD;
  f32x4 sum = 0.0f;
#pragma unroll 8
  for (int i = 0; i < each; ++i) sum += __builtin_nontemporal_load(p + i * 512);
  if (sum[0] == 12345.0f) to[THREAD] = sum[1] + sum[2] + sum[3];
}

// The same several times, all of a block's reads of one time before those of the next. Each time it
// reads the part of the block that is `shift` further.
KERNEL(512) again(const f32x4* from, float* to, int each, int times, int shift, int blocks) {
  f32x4 sum = 0.0f;
  for (int round = 0; round < times; ++round) {
    const long part = (static_cast<int>(BLOCK) + round * shift) % blocks;
    const f32x4* p = from + part * each * 512 + THREAD;
#pragma unroll 8
    for (int i = 0; i < each; ++i) sum += __builtin_nontemporal_load(p + i * 512);
    asm volatile("" ::: "memory");
  }
  if (sum[0] == 12345.0f) to[THREAD] = sum[1] + sum[2] + sum[3];
}

// Blocks 0 and `other` hand a counter to and fro; `other` begins some naps of 64 cycles later.
KERNEL(64) hand_over(unsigned* word, int rounds, int other, int naps) {
  const bool second = BLOCK == static_cast<unsigned>(other);
  if (THREAD != 0 || (BLOCK != 0 && !second)) return;
  for (int i = 0; second && i < naps; ++i) __builtin_amdgcn_s_sleep(1);
  for (int i = 0; i < rounds; ++i) {
    const unsigned mine = 2 * i + (second ? 1 : 0);
    while (LOAD(word) != mine) {
    }
    STORE(word, mine + 1);
  }
}

// All blocks add to one counter and wait for all.
KERNEL(64) barriers(unsigned* word, int rounds, int blocks) {
  for (int i = 1; i <= rounds; ++i) {
    if (THREAD == 0) {
      ADD(word);
      while (LOAD(word) < static_cast<unsigned>(i * blocks)) __builtin_amdgcn_s_sleep(1);
    }
    __builtin_amdgcn_s_barrier();
  }
}

KERNEL(256) products(float* to, int rounds) {
  f32x4 sums[4] = {};
  s16x4 a = static_cast<short>(THREAD), b = static_cast<short>(THREAD + 1);
  for (int i = 0; i < rounds; ++i) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sums[k] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, sums[k], 0, 0, 0);
    }
  }
  const f32x4 all = sums[0] + sums[1] + sums[2] + sums[3];
  if (all[0] == 12345.0f) to[THREAD] = all[0];
}

// Block 1 reads `count` lines; then block 0, on another die, reads them one after the other and
// counts the ticks.
KERNEL(64) chase(const unsigned* from, unsigned* ticks, int count) {
  if (THREAD != 0 || BLOCK > 1) return;
  for (int i = 0; BLOCK == 0 && i < 1000; ++i) __builtin_amdgcn_s_sleep(16);
  const unsigned long long begin = CLOCK;
  unsigned last = 0;
  for (int i = 0; i < count; ++i) last = from[i * 32 + last];
  asm volatile("" ::"v"(last));
  if (BLOCK == 0) *ticks = static_cast<unsigned>(CLOCK - begin);
}

// Loads that bypass the unit's cache and are answered by the die's.
template <class T>
static __attribute__((device, always_inline)) T near(const T* p) {
  T value;
  if constexpr (sizeof(T) == 4) {
    asm volatile("global_load_dword %0, %1, off sc0\\ns_waitcnt vmcnt(0)"
                 : "=v"(value) : "v"(p) : "memory");
  } else {
    asm volatile("global_load_dwordx2 %0, %1, off sc0\\ns_waitcnt vmcnt(0)"
                 : "=v"(value) : "v"(p) : "memory");
  }
  return value;
}

// As `barriers`, in two levels. The last block of a die adds to the counter of all dies; one block
// of each die waits for that and stores what the others of its die wait for, in the die's cache.
KERNEL(64) barriers_by_die(unsigned* word, int rounds, int blocks) {
  const int die = BLOCK % 8;
  unsigned *all = word, *own = word + 64 * (1 + die), *local = word + 64 * (9 + die);
  for (int i = 1; i <= rounds; ++i) {
    if (THREAD == 0) {
      if (ADD(own) + 1 == static_cast<unsigned>(i * blocks / 8)) {
        ADD(all);
        while (LOAD(all) < 8u * i) __builtin_amdgcn_s_sleep(1);
        *(volatile unsigned*)local = i;
      } else {
        while (near(local) < static_cast<unsigned>(i)) __builtin_amdgcn_s_sleep(1);
      }
    }
    __builtin_amdgcn_s_barrier();
  }
}

// As `barriers`, with a counter for each die, all of which a block waits for, a lane each.
KERNEL(64) barriers_spread(unsigned* word, int rounds, int blocks) {
  for (int i = 1; i <= rounds; ++i) {
    if (THREAD == 0) ADD(word + 64 * (BLOCK % 8));
    if (THREAD < 8) {
      while (LOAD(word + 64 * THREAD) < static_cast<unsigned>(i * blocks / 8)) {
        __builtin_amdgcn_s_sleep(1);
      }
    }
    __builtin_amdgcn_s_barrier();
  }
}

// Each block stores its part of `count` packets (a value and the round) and waits for all of them.
KERNEL(512) exchange(unsigned long long* packets, int rounds, int count, int blocks) {
  const int each = (count + blocks - 1) / blocks, mine = BLOCK * each + THREAD;
  for (int i = 1; i <= rounds; ++i) {
    unsigned long long* here = packets + (i & 1) * count;
    if (THREAD < each && mine < count) STORE(here + mine, (unsigned long long)i);
    for (int at = THREAD; at < count; at += 512) {
      while (LOAD(here + at) < (unsigned long long)i) __builtin_amdgcn_s_sleep(1);
    }
    __builtin_amdgcn_s_barrier();
  }
}

// As `exchange`, in two levels: the first block of each die waits for all packets and stores them
// again, for the others of its die, in the die's cache.
KERNEL(512) exchange_by_die(unsigned long long* packets, int rounds, int count, int blocks) {
  const int each = (count + blocks - 1) / blocks, mine = BLOCK * each + THREAD;
  for (int i = 1; i <= rounds; ++i) {
    unsigned long long* here = packets + (i & 1) * count;
    unsigned long long* local = packets + (2 + 2 * (BLOCK % 8) + (i & 1)) * count;
    if (THREAD < each && mine < count) STORE(here + mine, (unsigned long long)i);
    for (int at = THREAD; at < count; at += 512) {
      if (BLOCK < 8) {
        while (LOAD(here + at) < (unsigned long long)i) __builtin_amdgcn_s_sleep(1);
        *(volatile unsigned long long*)(local + at) = i;
      } else {
        while (near(local + at) < (unsigned long long)i) __builtin_amdgcn_s_sleep(1);
      }
    }
    __builtin_amdgcn_s_barrier();
  }
}
"""


@lru_cache(maxsize=1)
def code() -> bytes:
    """The code object with the kernels."""
    return compile_hip(HEAD + SOURCE, "gfx942", ("-O3",))


def seconds(
    kernels: bytes, kernel: str, threads: int, arguments: Arguments, units: int = COMPUTE_UNITS
) -> float:
    """The predicted time of a launch of `units` blocks."""
    module = check(hip.hipModuleLoadData(kernels))
    function = check(hip.hipModuleGetFunction(module, kernel.encode()))
    begin, end = check(hip.hipEventCreate()), check(hip.hipEventCreate())
    check(hip.hipEventRecord(begin, None))
    launch(function, units, threads, arguments)
    check(hip.hipEventRecord(end, None))
    check(hip.hipEventSynchronize(end))
    return float(check(hip.hipEventElapsedTime(begin, end))) / 1e3


def memory_bandwidth() -> float:
    """The rate of memory reads in TB/s."""
    each = 32
    nbytes = COMPUTE_UNITS * each * 8192
    with emulated("mi300x"), Buffers() as held:
        arguments = Arguments(held.empty(nbytes), held.empty(4096), np.int32(each))
        return nbytes / seconds(code(), "stream", 512, arguments) / 1e12


def read_again(each: int, times: int, shift: int) -> float:
    """The seconds in which all compute units read `each` times 8 KB, the given number of times."""
    numbers = (np.int32(n) for n in (each, times, shift, COMPUTE_UNITS))
    with emulated("mi300x"), Buffers() as held:
        there, out = held.empty(COMPUTE_UNITS * each * 8192), held.empty(4096)
        return seconds(code(), "again", 512, Arguments(there, out, *numbers))


def cache_bandwidth() -> float:
    """The rate of the memory-side cache in TB/s, from the second and later of four reads of the
    same memory, each by other dies.
    """
    each = 32
    taken = read_again(each, 4, 1) - read_again(each, 2, 1)
    return 2 * COMPUTE_UNITS * each * 8192 / taken / 1e12


def cache_latency() -> float:
    """The nanoseconds of a load that the memory-side cache answers."""
    count = 64
    with emulated("mi300x"), Buffers() as held:
        lines = held.upload(np.zeros(32 * count, np.uint32))
        ticks = held.upload(np.zeros(1, np.uint32))
        seconds(code(), "chase", 64, Arguments(lines, ticks, np.int32(count)))
        return float(download(ticks, (1,), np.uint32)[0]) * 10 / count


def hand_over(other: int) -> float:
    """The nanoseconds from one block's store to a counter until another block has read the value:
    half a round trip between block 0 and block `other`. The result is the mean over eight start
    times of the other block, because the time between a store and the next poll is the same in each
    round of a launch. Block 8 is on the same die as block 0, block 1 on another die.
    """
    rounds, taken = 20, []
    with emulated("mi300x"), Buffers() as held:
        for naps in range(0, 16, 2):
            word = held.upload(np.zeros(32, np.uint32))
            arguments = Arguments(word, np.int32(rounds), np.int32(other), np.int32(naps))
            taken.append(seconds(code(), "hand_over", 64, arguments) / (2 * rounds))
    return float(np.mean(taken)) * 1e9


def barrier(kernel: str = "barriers") -> float:
    """The microseconds of a barrier of all compute units."""
    rounds = 5
    with emulated("mi300x"), Buffers() as held:
        word = held.upload(np.zeros(64 * (1 + 2 * DIES), np.uint32))
        arguments = Arguments(word, np.int32(rounds), np.int32(COMPUTE_UNITS))
        return seconds(code(), kernel, 64, arguments) / rounds * 1e6


def exchange(count: int, kernel: str = "exchange") -> float:
    """The microseconds in which each compute unit receives `count` packets that all units have
    sent.
    """
    rounds = 6
    with emulated("mi300x"), Buffers() as held:
        packets = held.upload(np.zeros((2 + 2 * DIES) * count, np.uint64))
        sizes = (np.int32(n) for n in (rounds, count, COMPUTE_UNITS))
        return seconds(code(), kernel, 512, Arguments(packets, *sizes)) / rounds * 1e6


def matrix_rate() -> float:
    """The rate of the matrix units in TFLOP/s of bf16."""
    rounds = 512
    with emulated("mi300x"), Buffers() as held:
        taken = seconds(code(), "products", 256, Arguments(held.empty(4096), np.int32(rounds)))
    return COMPUTE_UNITS * 4 * rounds * 4 * 2 * 16**3 / taken / 1e12
