// Copies rows of caches that grow (keys and values) to shared memory. Used by the operand stream
// (stream.h) and by the loading thread of the variant `matrix` (matrix.h).

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

// The rows from `begin` to `end` of a growing cache, which one task reads. newest: the number of
// the row that this iteration writes. All rows before it were written in earlier iterations.
struct ArkGrown {
  ark_u32 begin;
  ark_u32 end;
  ark_u32 newest;
};
// The task reads part number `part` of all rows or, if `window` is above 0, of that many latest
// rows.
ARK_DEVICE ArkGrown ark_grown(ark_u32 length, ark_u32 rows, ark_u32 part, ark_u32 parts,
                              ark_u32 window = 0u) {
  const ark_u32 all = length < rows ? length + 1u : rows;
  const ark_u32 seen = window != 0u && window < all ? window : all;
  const auto border = [&](ark_u32 n) {
    return all - seen + static_cast<ark_u32>(static_cast<ark_u64>(seen) * n / parts);
  };
  return ArkGrown{border(part), border(part + 1u), all - 1u};
}
ARK_DEVICE ark_u32 ark_grown_stages(const ArkGrowth& g, ark_u32 length) {
  const ArkGrown rows = ark_grown(length, g.rows, g.part, g.parts, g.window);
  return (rows.end - rows.begin + g.step - 1u) / g.step;
}
