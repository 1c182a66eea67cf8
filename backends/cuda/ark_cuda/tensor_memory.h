// Tensor memory (sm_100a), where a product's sums are: 128 lanes of 512 columns of 32 bits. A
// kernel has ARK_SUM_COLUMNS of them, as many as a tile may have, from its beginning to its end.

#define ARK_HAS_TENSOR_MEMORY 1
constexpr ark_u32 ARK_SUM_COLUMNS = 256u;

// One warp: takes the columns; where they begin is written to shared memory.
ARK_DEVICE void ark_sums_take(ark_u32* place) {
  asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(
                   ark_shared_address(place)),
               "n"(ARK_SUM_COLUMNS)
               : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}
// One warp: gives them back; before the block ends it has to.
ARK_DEVICE void ark_sums_give_back(ark_u32 place) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(place),
               "n"(ARK_SUM_COLUMNS)
               : "memory");
}
// Makes a barrier between threads order accesses to tensor memory too.
ARK_DEVICE void ark_sums_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
ARK_DEVICE void ark_sums_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}
// A barrier completes when all products of the thread so far have.
ARK_DEVICE void ark_products_commit(ark_u32 barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}
// Sixteen columns of sixteen lanes, by a warp: a thread has of each eight columns two in lane
// `ark_lane() / 4` and two in the eighth lane behind it, as a warpgroup's product has them.
ARK_DEVICE void ark_sums_load(ark_u32 place, ark_u32 (&v)[8]) {
  asm volatile("tcgen05.ld.sync.aligned.16x256b.x2.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]), "=r"(v[4]), "=r"(v[5]), "=r"(v[6]),
                 "=r"(v[7])
               : "r"(place)
               : "memory");
}
ARK_DEVICE void ark_sums_loaded() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }
// The same lane of a warp each time, which the compiler knows to be one.
ARK_DEVICE bool ark_one_lane() {
  ark_u32 one;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}"
               : "=r"(one)::"memory");
  return one != 0u;
}
