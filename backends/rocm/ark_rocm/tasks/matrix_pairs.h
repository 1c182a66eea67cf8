// 8-bit floats on the matrix units that multiply them directly (gfx942 and gfx950). Two neighbours
// along k count as one 16-bit element. So loads, shared memory and the loop of matrix.h are those
// of 16-bit types with half the length along k.

#if defined(__gfx942__) || defined(__gfx950__)
template <typename T>
struct ArkPair {
  ark_u16 bits;
};

template <typename T>
ARK_DEVICE ArkSide<ArkPair<T>> ark_pairs(const ArkSide<T>& side) {
  return {reinterpret_cast<const ArkPair<T>*>(side.at),
          side.row_stride / 2,
          1,
          side.rows,
          side.depth / 2,
          side.wide};
}

#if defined(__gfx950__)
// v_mfma_f32_16x16x128_f8f6f4: a lane has 32 of the 128 elements along k. They may be any 32
// elements, if both operands have the same ones. Formats: 0 for e4m3, 1 for e5m2.
typedef int ark_i32x8 __attribute__((ext_vector_type(8)));
template <typename T>
constexpr int ARK_FORMAT = 0;
template <>
constexpr int ARK_FORMAT<ark_e5m2> = 1;
template <typename T>
struct ArkUnit<ArkPair<T>> {
  static constexpr int STEP = 64, BLOCK_K = 64;
  typedef ark_i32x8 part;
  ARK_METHOD static part load(const ark_u16* p) {
    struct {
      ark_part low, high;
    } both = {ark_load_part(p), ark_load_part(p + 32)};
    return __builtin_bit_cast(ark_i32x8, both);
  }
};
template <typename A, typename B>
ARK_DEVICE ark_block ark_products(const ArkPair<A>*, const ArkPair<B>*, ark_i32x8 x, ark_i32x8 y,
                                  ark_block c) {
  return __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, c, ARK_FORMAT<A>, ARK_FORMAT<B>, 0,
                                                          0, 0, 0);
}
#else
// gfx942's e4m3 (FNUZ) has a different exponent bias and no negative zero. The bits of an OCP e4m3
// number mean half the number in FNUZ. The bits of OCP's -0 mean NaN in FNUZ, and the bits of OCP's
// NaN mean a number.
template <>
constexpr float ARK_SUM_SCALE<ArkPair<ark_e4m3>, ArkPair<ark_e4m3>> = 4.0f;
ARK_DEVICE void ark_split_of(const ArkPair<ark_e4m3>*, const ark_u16x8& piece, ark_u16x8* parts) {
  typedef ark_u32 words __attribute__((ext_vector_type(4)));
  words bytes = __builtin_bit_cast(words, piece);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const ark_u32 magnitude = bytes[i] & 0x7f7f7f7fu;
    const ark_u32 zeros = ~(magnitude + 0x7f7f7f7fu) & 0x80808080u;
    const ark_u32 none = (magnitude + 0x01010101u) & 0x80808080u;
    bytes[i] = (bytes[i] & ~zeros & ~((none >> 7) * 0xffu)) | none;
  }
  parts[0] = __builtin_bit_cast(ark_u16x8, bytes);
}
template <typename A, typename B>
ARK_DEVICE ark_block ark_products(const ArkPair<A>*, const ArkPair<B>*, ark_part x, ark_part y,
                                  ark_block c) {
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, x),
                                                    __builtin_bit_cast(long, y), c, 0, 0, 0);
}
#endif

template <int TM, int TN, int WAVES_M, int WAVES_N, int BUFFERS, bool A_ALONG_K, bool B_ALONG_K,
          typename A, typename B, class End>
ARK_DEVICE void ark_pairs_tile(char* shared, const ArkSide<A>& a, const ArkSide<B>& b,
                               const End& end) {
  static_assert(A_ALONG_K && B_ALONG_K, "pairs lie along k");
  ark_matrix_tile<TM, TN, WAVES_M, WAVES_N, BUFFERS, true, true>(shared, ark_pairs(a), ark_pairs(b),
                                                                 end);
}
#endif
