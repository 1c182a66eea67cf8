// Dot products of rows of weights with an input.

ARK_DEVICE float ark_scalar(const float* p, int i) { return p[i]; }
ARK_DEVICE float ark_scalar(const ark_f16* p, int i) { return ark_float(p[i]); }
ARK_DEVICE float ark_scalar(const ark_bf16* p, int i) { return ark_float(p[i]); }

// Multiplies 16 bytes of weights with the same number of floats at x.
ARK_DEVICE float ark_piece_dot(const float*, ark_u32x4 w, const float* x) {
  const ark_f32x4 a = __builtin_bit_cast(ark_f32x4, w);
  const ark_f32x4 b = *reinterpret_cast<const ark_f32x4*>(x);
  return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3];
}
ARK_DEVICE float ark_low(const ark_bf16*, ark_u32 pair) { return ark_bits_float(pair << 16); }
ARK_DEVICE float ark_high(const ark_bf16*, ark_u32 pair) {
  return ark_bits_float(pair & 0xffff0000u);
}
ARK_DEVICE float ark_low(const ark_f16*, ark_u32 pair) {
  return ark_float(ark_f16{static_cast<ark_u16>(pair)});
}
ARK_DEVICE float ark_high(const ark_f16*, ark_u32 pair) {
  return ark_float(ark_f16{static_cast<ark_u16>(pair >> 16)});
}
template <typename T>
ARK_DEVICE float ark_piece_dot(const T* type, ark_u32x4 w, const float* x) {
  const ark_f32x4 b = *reinterpret_cast<const ark_f32x4*>(x);
  const ark_f32x4 c = *reinterpret_cast<const ark_f32x4*>(x + 4);
  return ark_low(type, w[0]) * b[0] + ark_high(type, w[0]) * b[1] + ark_low(type, w[1]) * b[2] +
         ark_high(type, w[1]) * b[3] + ark_low(type, w[2]) * c[0] + ark_high(type, w[2]) * c[1] +
         ark_low(type, w[3]) * c[2] + ark_high(type, w[3]) * c[3];
}

// A lane's share of the dot products of ROWS rows of k weights with x; the caller adds the shares
// of the warp's lanes. Each weight is read only once, so the loads of weights bypass the cache. The
// loads of all rows are in flight at the same time.
#define ARK_HAS_ROWS_DOT 1
template <int ROWS, typename T>
ARK_DEVICE void ark_rows_dot(const T* w, int stride, const float* x, int k, float* acc) {
  constexpr int PIECE = 16 / sizeof(T);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) acc[r] = 0.0f;
  if (k % 8 != 0 || stride % 8 != 0) {
    for (int i = ark_lane(); i < k; i += ARK_LANES) {
#pragma unroll
      for (int r = 0; r < ROWS; ++r) acc[r] += ark_scalar(w + r * stride, i) * x[i];
    }
    return;
  }
#pragma unroll 2
  for (int i = ark_lane() * PIECE; i < k; i += ARK_LANES * PIECE) {
    ark_u32x4 piece[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      piece[r] = __builtin_nontemporal_load(
          reinterpret_cast<const ark_u32x4*>(w + static_cast<ark_i64>(r) * stride + i));
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) acc[r] += ark_piece_dot(w, piece[r], x + i);
  }
}
template <typename T>
ARK_DEVICE float ark_row_dot(const T* w, const float* x, int k) {
  float total;
  ark_rows_dot<1>(w, 0, x, k, &total);
  return total;
}
