// Acquires, releases, polls and packets. They determine which writes of a processor, another device
// or the host become visible to a thread.

// Markers for the lint of the machine code (ark_rocm_emulator.lint): comments in the assembly,
// without an instruction. Markers follow the read of a flag (READ) and an acquire (ACQUIRED).
// Others stand before and after code that publishes data, and where all stores of the block have
// arrived. At each marker the lint checks that the assembly has the required waits and cache
// operations.
#define ARK_READ(scope) asm volatile("; ark.read " scope::: "memory")
#define ARK_ACQUIRED(scope) asm volatile("; ark.acquire " scope::: "memory")
#define ARK_RELEASES(scope) asm volatile("; ark.release " scope::: "memory")
#define ARK_RELEASED(scope) asm volatile("; ark.released " scope::: "memory")
#define ARK_BLOCK_ARRIVED() asm volatile("; ark.arrived workgroup" ::: "memory")

ARK_DEVICE ark_u32 ark_load_acquire(const ark_u32* p, bool system) {
  const auto* g = ark_to_global(p);
  ark_u32 value;
  if (system) {
    value = __hip_atomic_load(g, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_READ("system");
    ARK_ACQUIRED("system");
  } else {
    value = __hip_atomic_load(g, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
    ARK_READ("agent");
    ARK_ACQUIRED("agent");
  }
  return value;
}
// Polls do not acquire, because an acquire invalidates the processor's caches. Only the poll that
// succeeds is followed by an acquire fence.
#define ARK_HAS_POLL 1
ARK_DEVICE ark_u32 ark_poll(const ark_u32* p, bool system) {
  const auto* g = ark_to_global(p);
  ark_u32 value;
  if (system) {
    value = __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_READ("system");
  } else {
    value = __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    ARK_READ("agent");
  }
  return value;
}
ARK_DEVICE void ark_polled(bool system) {
  if (system) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
    ARK_ACQUIRED("system");
  } else {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    ARK_ACQUIRED("agent");
  }
}
// A release is written as a fence, a wait and a relaxed store. This works around a fault of clang
// 22 (fixed in llvm-project PR 178316): for a release store, it omits the wait after a cache
// write-back if the wave itself has no access in flight. The store could then overtake the data
// that it publishes.
ARK_DEVICE void ark_release_to_device() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  ark_drain();
  ARK_RELEASES("agent");
}
ARK_DEVICE void ark_release_to_system() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  ark_drain();
  ARK_RELEASES("system");
}
ARK_DEVICE void ark_add_release(ark_u32* p, ark_u32 v, bool system) {
  auto* g = ark_to_global(p);
  if (system) {
    ark_release_to_system();
    __hip_atomic_fetch_add(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    ARK_RELEASED("system");
  } else {
    ark_release_to_device();
    __hip_atomic_fetch_add(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    ARK_RELEASED("agent");
  }
}
ARK_DEVICE ark_u32 ark_cas(ark_u32* p, ark_u32 expected, ark_u32 desired) {
  ark_release_to_device();
  __hip_atomic_compare_exchange_strong(ark_to_global(p), &expected, desired, __ATOMIC_ACQUIRE,
                                       __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT);
  ARK_RELEASED("agent");
  ARK_ACQUIRED("agent");
  return expected;
}
ARK_DEVICE ark_u32 ark_claim(ark_u32* p) {
  return __hip_atomic_fetch_add(ark_to_global(p), 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
ARK_DEVICE ark_u32 ark_load_host(const ark_u32* p) { return ark_load_acquire(p, true); }
ARK_DEVICE ark_u32 ark_peek_host(const ark_u32* p) {
  return __hip_atomic_load(ark_to_global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
ARK_DEVICE void ark_post_host(ark_u32* p, ark_u32 v) {
  __hip_atomic_store(ark_to_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
ARK_DEVICE void ark_store_host(ark_u32* p, ark_u32 v) {
  ark_release_to_system();
  __hip_atomic_store(ark_to_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  ARK_RELEASED("system");
}
// Loads and stores a word that only the lanes of one wave share, without ordering other accesses.
ARK_DEVICE ark_u32 ark_warp_load(const ark_u32* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);
}
ARK_DEVICE void ark_warp_store(ark_u32* p, ark_u32 v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WAVEFRONT);
}
ARK_DEVICE ark_u64 ark_packet_load(const ark_u64* p, bool system) {
  const auto* g = ark_to_global(p);
  return system ? __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)
                : __hip_atomic_load(g, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
ARK_DEVICE void ark_packet_store(ark_u64* p, ark_u64 v, bool system) {
  auto* g = ark_to_global(p);
  if (system) {
    __hip_atomic_store(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  } else {
    __hip_atomic_store(g, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
}
