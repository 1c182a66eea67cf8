// The rows that a task reads of a cache that grows (keys and values). Used by the operand stream
// (stream_growth.h) and by the loading thread of the variant `matrix` (attention_boxed.h).

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
