// Scores, exponentials and sums of attention with one query row.

constexpr float ARK_LOG2_E = 1.44269504f;

// 2^v, accurate to one unit in the last place; 0 below the least normal number.
ARK_DEVICE float ark_exp2(float v) { return __builtin_amdgcn_exp2f(v); }

// A lane's share of one query head's result: N elements of the head's weighted sum of values. All
// lanes of the wave have the same running maximum.
template <int N>
struct ArkHeadState {
  float top;  // scores are times log2(e)
  float weight;
  float sum[N];

  ARK_METHOD void clear() {
    top = -1e30f;
    weight = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] = 0.0f;
  }
  // Raises the running maximum to `most`, which is at least as large as all new scores, and
  // rescales the sums.
  ARK_METHOD void rise(float most) {
    const float keep = ark_exp2(top - most);
    top = most;
    weight *= keep;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] *= keep;
  }
  ARK_METHOD void add(float share, const float (&value)[N]) {
    weight += share;
#pragma unroll
    for (int n = 0; n < N; ++n) sum[n] += share * value[n];
  }
};

// Converts 16 bytes of elements to floats. `type` only selects the element type.
template <typename T, int N>
ARK_DEVICE void ark_widened(const T* type, ark_u32x4 piece, float (&to)[N]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = ark_low(type, piece[i]);
    to[2 * i + 1] = ark_high(type, piece[i]);
  }
}
template <typename T>
ARK_DEVICE ark_u32x4 ark_piece_at(const T* p) {
  return *(const ark_global<ark_u32x4>*)p;
}

// Each half of the wave (32 lanes) consists of groups of GROUP neighbouring lanes. Sums v over the
// lanes of a half that have the same index in their group; every lane gets the sum for its index.
template <int GROUP>
ARK_DEVICE float ark_half_sum(float v) {
  if (GROUP <= 4) v += ark_row_move<0x124>(v);  // row_ror 4
  if (GROUP <= 8) v += ark_row_move<0x128>(v);  // row_ror 8
  return v + ark_bits_float(static_cast<ark_u32>(__builtin_amdgcn_ds_swizzle(
                 static_cast<int>(ark_float_bits(v)), 0x401f)));  // the other row of 16
}

// Sums v over each group of LANES (4, 8 or 16) neighbouring lanes. Every lane of a group gets the
// group's sum. (Each lane has a part of the score of one position.)
template <int LANES>
ARK_DEVICE float ark_group_sum(float v) {
  v += ark_row_move<0xb1>(v);
  v += ark_row_move<0x4e>(v);
  if (LANES >= 8) v += ark_row_move<0x141>(v);
  if (LANES >= 16) v += ark_row_move<0x140>(v);
  return v;
}
