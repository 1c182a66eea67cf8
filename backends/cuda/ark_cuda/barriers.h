// Barriers in shared memory on which asynchronous copies signal completion (sm_90 and later).

ARK_DEVICE ark_u32 ark_shared_address(const void* p) {
  return static_cast<ark_u32>(__cvta_generic_to_shared(p));
}

ARK_DEVICE void ark_barrier_init(ark_u64* barrier, ark_u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ark_shared_address(barrier)),
               "r"(count)
               : "memory");
}
ARK_DEVICE void ark_barrier_arrive(ark_u64* barrier, ark_u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(ark_shared_address(barrier)),
               "r"(count)
               : "memory");
}
// True if the phase of this parity of an mbarrier has completed. A barrier's first phase has parity
// 0; on a new barrier, the phase of parity 1 counts as completed. at: the barrier's address in
// shared memory.
ARK_DEVICE bool ark_barrier_passed_at(ark_u32 at, ark_u32 parity) {
  ark_u32 passed;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(at), "r"(parity)
      : "memory");
  return passed != 0u;
}
ARK_DEVICE bool ark_barrier_passed(ark_u64* barrier, ark_u32 parity) {
  return ark_barrier_passed_at(ark_shared_address(barrier), parity);
}
// Like ark_barrier_passed_at, but the hardware does not suspend the warp (mbarrier.test_wait).
ARK_DEVICE bool ark_barrier_tested_at(ark_u32 at, ark_u32 parity) {
  ark_u32 passed;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      " selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(at), "r"(parity)
      : "memory");
  return passed != 0u;
}
// Called by one lane: starts a copy of whole 16-byte units to shared memory, which signals a
// barrier on completion.
ARK_DEVICE void ark_bulk_copy(ark_u32 to, ark_u64 from, ark_u32 bytes, ark_u32 barrier,
                              ark_u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// The clock cycles of so many nanoseconds at 1.75 GHz, about the clock of busy H100 and H200 GPUs,
// for which the paces of prefetches were measured. Only these paces depend on it.
ARK_DEVICE constexpr ark_u32 ark_clocks(ark_u32 nanoseconds) { return nanoseconds * 7u / 4u; }

ARK_DEVICE ark_u32 ark_clock() {
  ark_u32 now;
  asm volatile("mov.u32 %0, %clock;" : "=r"(now)::"memory");
  return now;
}
