// Exchanges of values between the lanes of a wave, and reductions over a wave.

ARK_DEVICE ark_u32 ark_shfl_xor(ark_u32 v, int mask) {
  const int from = (ark_lane() ^ mask) * 4;
  return static_cast<ark_u32>(__builtin_amdgcn_ds_bpermute(from, static_cast<int>(v)));
}
ARK_DEVICE float ark_shfl_xor(float v, int mask) {
  return ark_bits_float(ark_shfl_xor(ark_float_bits(v), mask));
}

// Moves a value between lanes of a row (16 lanes) by a DPP instruction, without shared memory.
// CONTROL: the DPP control that selects the source lane.
template <int CONTROL, typename T>
ARK_DEVICE T ark_row_move(T v) {
  const int bits = __builtin_bit_cast(int, v);
  return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(0, bits, CONTROL, 0xf, 0xf, true));
}
// The same for the lanes in the given groups of a row; the others keep their own value. GROUPS: a
// bit for each group of four lanes.
template <int CONTROL, int GROUPS>
ARK_DEVICE float ark_row_move(float own, float v) {
  const int old = __builtin_bit_cast(int, own), bits = __builtin_bit_cast(int, v);
  return __builtin_bit_cast(float,
                            __builtin_amdgcn_update_dpp(old, bits, CONTROL, 0xf, GROUPS, false));
}
template <typename T>
ARK_DEVICE T ark_lane_value(T v, int lane) {
  return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, v), lane));
}

struct ArkAdd {
  ARK_DEVICE float of(float a, float b) { return a + b; }
};
struct ArkMax {
  ARK_DEVICE float of(float a, float b) { return __builtin_fmaxf(a, b); }
};
struct ArkLeast {
  ARK_DEVICE ark_u32 of(ark_u32 a, ark_u32 b) { return a < b ? a : b; }
};

// Reduces a value over the wave: over pairs of lanes, quads, half rows (8 lanes), rows (16 lanes),
// and then over the wave's rows. All lanes get the same result.
template <typename OP, typename T>
ARK_DEVICE T ark_warp_reduce(T v) {
  v = OP::of(v, ark_row_move<0xb1>(v));   // quad_perm 1 0 3 2
  v = OP::of(v, ark_row_move<0x4e>(v));   // quad_perm 2 3 0 1
  v = OP::of(v, ark_row_move<0x141>(v));  // row_half_mirror
  v = OP::of(v, ark_row_move<0x140>(v));  // row_mirror
  T total = OP::of(ark_lane_value(v, 0), ark_lane_value(v, 16));
  if (ARK_LANES == 64) {
    total = OP::of(total, OP::of(ark_lane_value(v, 32), ark_lane_value(v, 48)));
  }
  return total;
}
ARK_DEVICE float ark_warp_sum(float v) { return ark_warp_reduce<ArkAdd>(v); }
ARK_DEVICE float ark_warp_max(float v) { return ark_warp_reduce<ArkMax>(v); }

// Chooses the next token among the candidates in a wave's lanes. It is the candidate with the
// highest score and, among equal scores, the lowest token. No score is NaN.
#define ARK_HAS_WARP_BEST 1
ARK_DEVICE void ark_warp_best(float& score, ark_u32& token) {
  const float top = ark_warp_max(score);
  token = ark_warp_reduce<ArkLeast>(score == top ? token : 0xffffffffu);
  score = top;
}
