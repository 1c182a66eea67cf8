// Tensor memory (sm_100a), which holds the sums of a product: 128 lanes of 512 columns of 32 bits.
// When it starts, a kernel allocates ARK_SUM_COLUMNS columns, the most that a tile uses. When it
// ends, it frees them.

#define ARK_HAS_TENSOR_MEMORY 1
constexpr ark_u32 ARK_SUM_COLUMNS = 256u;

// Called by one warp: allocates the columns and writes the number of the first one to shared
// memory.
ARK_DEVICE void ark_sums_take(ark_u32* place) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   ark_shared_address(place)),
               "n"(ARK_SUM_COLUMNS)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
// Called by one warp: frees the columns. This is required before the block ends.
ARK_DEVICE void ark_sums_give_back(ark_u32 place) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(place),
               "n"(ARK_SUM_COLUMNS)
               : "memory");
}
// These two fences are placed before and after a barrier between threads. The barrier then also
// orders accesses to tensor memory.
ARK_DEVICE void ark_sums_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
ARK_DEVICE void ark_sums_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
// Makes an mbarrier complete its phase when all products that this thread has started so far are
// complete.
ARK_DEVICE void ark_products_commit(ark_u32 barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}
// Called by a warp: loads 16 columns of 16 lanes of tensor memory in the register layout of wgmma.
// Of each eight columns, a thread gets two columns of lane ark_lane() / 4 and two columns of lane
// ark_lane() / 4 + 8.
ARK_DEVICE void ark_sums_load(ark_u32 place, ark_u32 (&v)[8]) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]),
                 "=r"(v[7])
               : "r"(place)
               : "memory");
}
ARK_DEVICE void ark_sums_loaded() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
// True in exactly one lane of the warp, always the same one (elect.sync). The compiler recognises
// that only one lane runs the code under this condition.
ARK_DEVICE bool ark_one_lane() {
  ark_u32 one;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(one)::"memory");
  return one != 0u;
}
