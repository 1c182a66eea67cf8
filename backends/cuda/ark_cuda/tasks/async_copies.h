// Asynchronous copies to shared memory (cp.async), which run while the task computes. If `here` is
// false, zeros are stored and nothing is loaded.
ARK_DEVICE void ark_copy_word(ark_u32 to, const float* from, bool here) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(here ? 4 : 0)
               : "memory");
}
ARK_DEVICE void ark_copy_words(ark_u32 to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
