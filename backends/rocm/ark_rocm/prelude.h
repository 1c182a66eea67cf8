// The device ABI on AMD GPUs. It includes no headers and uses only compiler builtins, so that any
// clang can compile it. A processor is a workgroup, a warp is a wave of ARK_LANES lanes. This
// header has types, threads, memory, barriers and votes, and clocks. In the source it is followed
// by lanes.h, order.h, arithmetic.h and dots.h. The dialect defines ARK_TICKS_NS, the length of a
// tick of the constant-rate clock.

typedef unsigned int ark_u32;
typedef int ark_i32;
typedef unsigned long long ark_u64;
typedef long long ark_i64;
typedef unsigned short ark_u16;
struct ark_f16 {
  ark_u16 bits;
};
struct ark_bf16 {
  ark_u16 bits;
};
typedef ark_u32 ark_u32x4 __attribute__((ext_vector_type(4)));
typedef float ark_f32x4 __attribute__((ext_vector_type(4)));

// Device functions are inlined, because otherwise the compiler does not know which pointers are to
// shared memory. Only functions that run when a wait takes long (ARK_COLD) are not inlined. They
// call no other function, so they need no stack, and a call takes only a few registers of the
// caller and no scratch memory.
#define ARK_DEVICE static inline __attribute__((device, always_inline))
#define ARK_METHOD inline __attribute__((device, always_inline))
#define ARK_BODY ARK_DEVICE
#define ARK_COLD static __attribute__((device, noinline, cold))
#define ARK_SHARED static __attribute__((device, shared))
#define ARK_SPIN_CHECK 0x3fu

// A pointer to device memory. It tells the compiler that the memory is not shared memory, so that
// loads and stores need no flat addressing.
template <typename T>
using ark_global = __attribute__((address_space(1))) T;
template <typename T>
ARK_DEVICE ark_global<T>* ark_to_global(T* p) {
  return (ark_global<T>*)p;
}
#define ARK_POINTER(type, address) ((type*)(ark_global<type>*)(address))

// Copies a value from device memory word by word. A plain copy could become a slow flat load: if
// one side of a branch loads from shared memory and the other side from device memory, the compiler
// merges both into one load with a flat address.
template <typename T>
ARK_DEVICE T ark_device_copy(ark_u64 address) {
  static_assert(sizeof(T) % sizeof(ark_u64) == 0, "whole words");
  struct {
    ark_u64 word[sizeof(T) / sizeof(ark_u64)];
  } words;
  for (unsigned i = 0u; i < sizeof(T) / sizeof(ark_u64); ++i) {
    words.word[i] = ((const ark_global<ark_u64>*)address)[i];
  }
  return __builtin_bit_cast(T, words);
}
#define ARK_DEVICE_COPY(type, address) ark_device_copy<type>(address)

// The scratch memory of tasks. Its address is a constant instead of a member of the context, so
// that the compiler sees that this is shared memory (LDS).
extern __attribute__((device, shared, aligned(16))) char ark_lds[];
#define ARK_SCRATCH(ctx) (ark_lds + ARK_LOOP_BYTES)
#define ARK_PARAMS(ctx) (static_cast<const ArkParams*>(ark_kernel_params()))
// These macros tell the compiler, in a function that is not inlined, which memory the context and
// the parameters are in. The low half of a shared-memory address is the offset in shared memory.
#define ARK_GIVEN(ctx) \
  (*(ArkCtx*)(__attribute__((address_space(3))) ArkCtx*)(ark_u32)(ark_u64) & (ctx))
#define ARK_CALLS_WAIT true
#define ARK_GIVEN_PARAMS(p) ARK_POINTER(const ArkParams, (ark_u64)(p))

ARK_DEVICE const void* ark_kernel_params() {
  return (const void*)__builtin_amdgcn_kernarg_segment_ptr();
}

constexpr int ARK_THREADS = ARK_LANES * ARK_WARPS;
#define ARK_HOLDS_RECORDS 1
#if defined(__GFX9__)
static_assert(ARK_LANES == 64, "CDNA waves have 64 lanes");
#else
static_assert(ARK_LANES == 32, "RDNA waves have 32 lanes");
#endif

// Returns the thread's number within the block. The asm statement hides from the compiler that
// every call returns the same number. Suppose that the body of a loop begins and ends with `if
// (ark_tid() == 0)`. A compiler that knows that both tests have the same outcome merges the end of
// an iteration with the beginning of the next one. The other lanes of the wave then reach the next
// barrier without lane 0, and wait there forever.
ARK_DEVICE int ark_tid() {
  int tid = static_cast<int>(__builtin_amdgcn_workitem_id_x());
  asm volatile("" : "+v"(tid));
  __builtin_assume(tid >= 0 && tid < ARK_THREADS);
  return tid;
}
ARK_DEVICE int ark_lane() { return ark_tid() & (ARK_LANES - 1); }
ARK_DEVICE int ark_warp() {
  const int warp = __builtin_amdgcn_readfirstlane(ark_tid() / ARK_LANES);
  __builtin_assume(warp >= 0 && warp < ARK_WARPS);
  return warp;
}

ARK_DEVICE void ark_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Converges the lanes of a wave. The lanes run in lockstep, so no barrier instruction is needed;
// the fences make the compiler keep the order of memory accesses.
ARK_DEVICE void ark_warp_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// Waits until this wave's stores have arrived. Then a release by another wave of the block covers
// them. The barrier's own fence orders stores only within the block.
ARK_DEVICE void ark_drain() {
#if defined(__GFX9__)
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
#else
  asm volatile("s_waitcnt_vscnt null, 0x0" ::: "memory");
#endif
}

ARK_DEVICE ark_u64 ark_ballot(bool v) {
#if defined(__GFX9__)
  return __builtin_amdgcn_ballot_w64(v);
#else
  return __builtin_amdgcn_ballot_w32(v);
#endif
}
ARK_DEVICE bool ark_warp_all(bool v) { return ark_ballot(!v) == 0u; }

ARK_SHARED ark_u32 ark_votes[ARK_WARPS];

// The state of prefetches during waits (tasks/prefetch.h). The first word is 1 + the index of the
// task whose wait ended last. The others are the task whose weights were prefetched last, and how
// many cache lines of these weights were prefetched; only the prefetching wave uses them.
ARK_SHARED ark_u32 ark_waited;
struct ArkPrefetched {
  ark_u32 task;
  int lines;
};
ARK_SHARED ArkPrefetched ark_prefetched;
// The task whose weights were prefetched last while a wave waited for packets (tasks/ask.h), and
// below it, in the lower half, how many cache lines of these weights were prefetched.
ARK_SHARED ark_u64 ark_asked_until;

// The task whose body has signalled its counters itself (tasks/prefetch.h), as 1 + its index; the
// end of its signals, which its record in shared memory then no longer has; and the place of this
// number in shared memory, in bytes.
struct ArkSignalled {
  ark_u32 task;
  ark_u32 end;
  ark_u32 place;
};
ARK_SHARED ArkSignalled ark_signalled;

// Votes of the block. Both return true if the condition is true in all threads. ark_all first waits
// for all accesses that the wave has in flight, so that a later release covers the block's stores.
// ark_agree does not wait for loads in flight.
#define ARK_HAS_AGREE 1
ARK_DEVICE bool ark_agree(bool v) {
  const bool mine = ark_warp_all(v);
  if (ARK_WARPS == 1) {
    ark_sync();
    return mine;
  }
  if (ark_lane() == 0) ark_votes[ark_warp()] = mine ? 1u : 0u;
  ark_sync();
  ark_u32 all = 1u;
  for (int w = 0; w < ARK_WARPS; ++w) all &= ark_votes[w];
  ark_sync();
  return __builtin_amdgcn_readfirstlane(all) != 0u;
}
// Like ark_agree (and ark_all), with one barrier instead of two, at the end of task `turn`.
// Consecutive votes use two slots alternately. So a slot is overwritten only two votes later, when
// all waves have read its result. Restores the record of a task that has signalled early.
ARK_SHARED ark_u32 ark_turns[2][ARK_WARPS];
ARK_DEVICE bool ark_agree_next(bool v, ark_u32 turn) {
  ark_u32* votes = ark_turns[turn % 2u];
  const bool mine = ark_warp_all(v);
  if (ark_lane() == 0) votes[ark_warp()] = mine ? 1u : 0u;
  ark_sync();
  ark_u32 all = 1u;
  for (int w = 0; w < ARK_WARPS; ++w) all &= votes[w];
  if (ark_signalled.task == turn + 1u && ark_tid() == 0) {
    *reinterpret_cast<ark_u32*>(ark_lds + ark_signalled.place) = ark_signalled.end;
  }
  return __builtin_amdgcn_readfirstlane(all) != 0u;
}
ARK_DEVICE bool ark_all(bool v) {
  ark_drain();
  return ark_agree(v);
}
ARK_DEVICE bool ark_all_next(bool v, ark_u32 turn) {
  ark_drain();
  return ark_agree_next(v, turn);
}

// Returns the ticks of a clock that runs at a constant rate and is the same for the whole device.
// LLVM 18 (ROCm 6.2 and 6.3) does not have the builtin for this clock, so the instruction's own
// builtin is used there.
ARK_DEVICE ark_u64 ark_steady_ticks() {
#if __has_builtin(__builtin_readsteadycounter)
  return __builtin_readsteadycounter();
#elif defined(__GFX9__)
  return __builtin_amdgcn_s_memrealtime();
#else
  return __builtin_amdgcn_s_sendmsg_rtnl(0x83);  // the message that requests the clock
#endif
}
ARK_DEVICE ark_u64 ark_time_ns() { return ark_steady_ticks() * ARK_TICKS_NS; }

// Sleeps for a short time, or after many polls for a longer time. readfirstlane tells the compiler
// that the condition is the same in the whole wave. Without readfirstlane, the compiler would
// execute both sides of the branch with some lanes masked. A wave would then sleep twice, because
// masked lanes do not prevent a sleep.
ARK_DEVICE void ark_pause(ark_u32 spins) {
  if (__builtin_amdgcn_readfirstlane(spins) < 64u) {
    __builtin_amdgcn_s_sleep(1);
  } else {
    __builtin_amdgcn_s_sleep(8);
  }
}

ARK_DEVICE float ark_bits_float(ark_u32 bits) { return __builtin_bit_cast(float, bits); }
ARK_DEVICE ark_u32 ark_float_bits(float value) { return __builtin_bit_cast(ark_u32, value); }
