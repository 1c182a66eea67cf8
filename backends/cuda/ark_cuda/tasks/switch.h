// Sums by the switch between GPUs (sm_90 and later). A multicast address stands for the same memory
// of all ranks: a load from it returns the sum over the ranks, and a store to it reaches all ranks.
// This code has never been run; see docs/channels.md.

struct ArkSwitched {
  ark_u32 word[4];
};
ARK_DEVICE ArkSwitched ark_switch_load(const float*, ark_u64 from) {
  ArkSwitched v;
  float f[4];
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(f[0]), "=f"(f[1]), "=f"(f[2]), "=f"(f[3])
               : "l"(from)
               : "memory");
  for (int i = 0; i < 4; ++i) v.word[i] = ark_float_bits(f[i]);
  return v;
}
ARK_DEVICE ArkSwitched ark_switch_load(const ark_bf16*, ark_u64 from) {
  ArkSwitched v;
  asm volatile(
      "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
      : "l"(from)
      : "memory");
  return v;
}
ARK_DEVICE ArkSwitched ark_switch_load(const ark_f16*, ark_u64 from) {
  ArkSwitched v;
  asm volatile("multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}
ARK_DEVICE void ark_switch_store(ark_u64 to, const ArkSwitched& v) {
  float f[4];
  for (int i = 0; i < 4; ++i) f[i] = ark_bits_float(v.word[i]);
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(f[0]),
               "f"(f[1]), "f"(f[2]), "f"(f[3])
               : "memory");
}

// Called by the block: sums `from` over all ranks and stores the sum to `to` on all ranks. Both are
// multicast addresses; the data is whole chunks of 16 bytes.
template <typename T>
ARK_DEVICE void ark_switch_sum(ark_u64 from, ark_u64 to, ark_i64 bytes) {
  constexpr int BATCH = 4;
  const ark_i64 chunks = bytes / 16;
  for (ark_i64 first = ark_tid(); first < chunks; first += BATCH * ARK_THREADS) {
    ArkSwitched v[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const ark_i64 at = first + b * ARK_THREADS;
      if (at < chunks) v[b] = ark_switch_load(static_cast<const T*>(nullptr), from + 16 * at);
    }
#pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      const ark_i64 at = first + b * ARK_THREADS;
      if (at < chunks) ark_switch_store(to + 16 * at, v[b]);
    }
  }
}
