// Bulk copies (cp.async.bulk, sm_90 and later) that one thread starts, and the barriers in shared
// memory that signal the completion of loads.

ARK_DEVICE ark_u32 ark_bulk_address(const void* p) {
  return static_cast<ark_u32>(__cvta_generic_to_shared(p));
}
// Called by one thread before its first bulk copies: initialises COUNT barriers, and makes ordinary
// stores of other threads (to global and shared memory) visible to the copies.
template <int COUNT>
ARK_DEVICE void ark_bulk_begin(ark_u64* full) {
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ark_bulk_address(full + i))
                 : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}
// Called by the same thread after the last wait on the barriers. The memory of the barriers may
// then be used for other data.
template <int COUNT>
ARK_DEVICE void ark_bulk_end(ark_u64* full) {
  for (int i = 0; i < COUNT; ++i) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(ark_bulk_address(full + i))
                 : "memory");
  }
}
ARK_DEVICE void ark_bulk_in(char* to, ark_u64 from, ark_u32 bytes, ark_u64* full) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ark_bulk_address(full)),
      "r"(bytes)
      : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(ark_bulk_address(to)),
      "l"(from), "r"(bytes), "r"(ark_bulk_address(full))
      : "memory");
}
ARK_DEVICE void ark_bulk_out(ark_u64 to, const char* from, ark_u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(ark_bulk_address(from)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits for a phase of a barrier. This wait needs no time limit: a copy that the block has started
// completes independently of other processors.
ARK_DEVICE void ark_bulk_await(ark_u64* full, ark_u32 parity) {
  ark_u32 passed;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(ark_bulk_address(full)), "r"(parity)
        : "memory");
  } while (passed == 0u);
}
