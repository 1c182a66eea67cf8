// The layout in memory of a row of a quantised matrix (RowType of ark/ir/dtype.py): codes, then a
// scale for each group of columns, then a zero point for each group, then padding.

template <class C>
constexpr int ARK_CODE_BITS = 8;
template <>
inline constexpr int ARK_CODE_BITS<ark_int4> = 4;
template <>
inline constexpr int ARK_CODE_BITS<ark_uint4> = 4;
template <>
inline constexpr int ARK_CODE_BITS<ark_fp4> = 4;

// A row of K codes of type C. Each group of GROUP codes has a scale and, with ZEROS, a zero point
// of type S.
template <class C, int K, int GROUP, class S, bool ZEROS>
struct alignas(16) ArkRow {
  static constexpr int COLUMNS = K, GROUPS = K / GROUP;
  static constexpr int SCALES_AT = K * ARK_CODE_BITS<C> / 8;
  static constexpr int ZEROS_AT = SCALES_AT + GROUPS * static_cast<int>(sizeof(S));
  static constexpr int END = ZEROS_AT + (ZEROS ? ZEROS_AT - SCALES_AT : 0);
  unsigned char bytes[(END + 15) / 16 * 16];
};

// The number of codes that a lane reads at a time; CODE_STEP of ark/ir/dtype.py has the same value.
constexpr int ARK_CODES = 8;

// Functions that return the scale and the zero point of a group of a quantised row.
template <class C, int K, int GROUP, class S, bool ZEROS>
ARK_DEVICE float ark_row_scale(const ArkRow<C, K, GROUP, S, ZEROS>& row, int group) {
  typedef ArkRow<C, K, GROUP, S, ZEROS> Row;
  return ark_get(reinterpret_cast<const S*>(row.bytes + Row::SCALES_AT), group);
}
template <class C, int K, int GROUP, class S, bool ZEROS>
ARK_DEVICE float ark_row_zero(const ArkRow<C, K, GROUP, S, ZEROS>& row, int group) {
  typedef ArkRow<C, K, GROUP, S, ZEROS> Row;
  if constexpr (!ZEROS) return 0.0f;
  return ark_get(reinterpret_cast<const S*>(row.bytes + Row::ZEROS_AT), group);
}

// The functions ark_code return code j of a 32-bit word as a float. Of eight 4-bit codes in a word,
// the even ones are in the low half and the odd ones in the high half.
template <class C>
constexpr int ARK_CODES_OF_WORD = 32 / ARK_CODE_BITS<C>;
ARK_DEVICE ark_u32 ark_code_of_four(ark_u32 word, int j) {
  return word >> (4 * (j / 2) + 16 * (j % 2)) & 15u;
}
ARK_DEVICE ark_u32 ark_code_of_eight(ark_u32 word, int j) { return word >> (8 * j) & 255u; }
ARK_DEVICE float ark_code(const ark_int4*, ark_u32 word, int j) {
  return static_cast<float>(static_cast<ark_i32>(ark_code_of_four(word, j) ^ 8u) - 8);
}
ARK_DEVICE float ark_code(const ark_uint4*, ark_u32 word, int j) {
  return static_cast<float>(static_cast<ark_i32>(ark_code_of_four(word, j)));
}
// Converts a 4-bit float code to float. Its exponent and mantissa (3 bits) are shifted to the
// exponent and mantissa bits of a float.
ARK_DEVICE float ark_code(const ark_fp4*, ark_u32 word, int j) {
  const ark_u32 code = ark_code_of_four(word, j);
  const float size = ark_bits_float((code & 7u) << 22) * ark_bits_float(253u << 23);
  return (code & 8u) != 0u ? -size : size;
}
ARK_DEVICE float ark_code(const signed char*, ark_u32 word, int j) {
  return static_cast<float>(static_cast<ark_i32>(ark_code_of_eight(word, j) ^ 128u) - 128);
}
ARK_DEVICE float ark_code(const unsigned char*, ark_u32 word, int j) {
  return static_cast<float>(static_cast<ark_i32>(ark_code_of_eight(word, j)));
}
ARK_DEVICE float ark_code(const ark_e4m3*, ark_u32 word, int j) {
  return ark_small_float<3, 7>(ark_code_of_eight(word, j));
}
ARK_DEVICE float ark_code(const ark_e5m2*, ark_u32 word, int j) {
  return ark_small_float<2, 15>(ark_code_of_eight(word, j));
}

// Computes eight values of a quantised row, from column k (a multiple of eight) on. A value is
// (code - zero point) * scale.
template <class C, int K, int GROUP, class S, bool ZEROS>
ARK_DEVICE void ark_eight_values(const ArkRow<C, K, GROUP, S, ZEROS>& row, int k,
                                 float (&v)[ARK_CODES]) {
  constexpr int EACH = ARK_CODES_OF_WORD<C>;
  const ark_u32* words =
      reinterpret_cast<const ark_u32*>(row.bytes + k / ARK_CODES * ARK_CODE_BITS<C>);
  const float scale = ark_row_scale(row, k / GROUP), zero = ark_row_zero(row, k / GROUP);
  ARK_VECTOR_LOOP
  for (int j = 0; j < ARK_CODES; ++j) {
    const float code = ark_code(static_cast<const C*>(nullptr), words[j / EACH], j % EACH);
    v[j] = (ZEROS ? code - zero : code) * scale;
  }
}

// Computes this lane's parts of the dot products of a quantised row with each of M rows of x. The
// rows of x are PITCH elements apart.
template <int M, int PITCH, class C, int K, int GROUP, class S, bool ZEROS, typename T>
ARK_DEVICE void ark_row_products(const ArkRow<C, K, GROUP, S, ZEROS>& row, const T* x,
                                 float (&sum)[M]) {
  constexpr int WIDE = ARK_LANES * ARK_CODES;
#if defined(ARK_VECTOR_BYTES)
  typedef float Eight __attribute__((vector_size(4 * ARK_CODES), aligned(4)));
  Eight total[M] = {};
  for (int k = 0; k < K; k += WIDE) {
    float v[ARK_CODES];
    ark_eight_values(row, k, v);
    const Eight own = *reinterpret_cast<const Eight*>(v);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      total[m] += own * *reinterpret_cast<const Eight*>(x + m * PITCH + k);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
    sum[m] = 0.0f;
    for (int j = 0; j < ARK_CODES; ++j) sum[m] += total[m][j];
  }
#else
#pragma unroll
  for (int m = 0; m < M; ++m) sum[m] = 0.0f;
  for (int k = ark_lane() * ARK_CODES; k < K; k += WIDE) {
    float v[ARK_CODES];
    ark_eight_values(row, k, v);
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const auto some = ark_load_pack<ARK_CODES>(x + m * PITCH + k);
#pragma unroll
      for (int j = 0; j < ARK_CODES; ++j) sum[m] += v[j] * ark_element(some.v, j);
    }
  }
#endif
}
