// A tile of a matrix product on tensor cores (mma.sync m16n8k16, fp32 sums). The warps divide the
// tile's columns. They also divide each chunk of k: a warp has 32 elements along k. Rows of a are
// converted and go through shared memory. Elements of b are loaded directly to registers, eight
// elements per lane. Lane l has elements 8 (l % 4) to 8 (l % 4) + 7 along k, so that a load has 16
// bytes. This differs from the instruction's order along k, which is correct because a and b have
// the same order.

ARK_DEVICE ark_u32 ark_pack(ark_u32 low, ark_u32 high) { return low | high << 16; }

// Loads eight elements that are `stride` apart, one by one. Only the first `left` are inside of the
// matrix; the others become zero.
template <typename T>
ARK_COLD uint4 ark_eight_narrow(const T* from, ark_i64 stride, int left) {
  ark_u32 bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) bits[i] = i < left ? from[i * stride].bits : 0u;
  return make_uint4(ark_pack(bits[0], bits[1]), ark_pack(bits[2], bits[3]),
                    ark_pack(bits[4], bits[5]), ark_pack(bits[6], bits[7]));
}
ARK_COLD float4 ark_four_narrow(const float* from, ark_i64 stride, int left) {
  return make_float4(left > 0 ? from[0] : 0.0f, left > 1 ? from[stride] : 0.0f,
                     left > 2 ? from[2 * stride] : 0.0f, left > 3 ? from[3 * stride] : 0.0f);
}

// Loads eight elements of one row from element k on; zeros outside of the matrix.
template <typename T>
ARK_DEVICE uint4 ark_eight(const ArkSide<T>& s, int row, int k) {
  if (row >= s.rows || k >= s.depth) return make_uint4(0u, 0u, 0u, 0u);
  const T* from = s.at + row * s.row_stride + k * s.k_stride;
  if (s.wide) return *reinterpret_cast<const uint4*>(from);
  return ark_eight_narrow(from, s.k_stride, s.depth - k);
}

// Eight elements of the next chunk of a, which a thread loads and later converts and stores to
// shared memory. An fp32 element becomes two bf16, whose products with b add up to the fp32 product
// within 2^-16.
template <typename T>
struct ArkEight {
  static constexpr int PARTS = 1;
  uint4 v;
  ARK_DEVICE_MEMBER void load(const ArkSide<T>& s, int row, int k) { v = ark_eight(s, row, k); }
  ARK_DEVICE_MEMBER void keep(char* to, int) const { *reinterpret_cast<uint4*>(to) = v; }
};
template <>
struct ArkEight<float> {
  static constexpr int PARTS = 2;
  float4 first, second;
  ARK_DEVICE_MEMBER void load(const ArkSide<float>& s, int row, int k) {
    first = second = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (row >= s.rows || k >= s.depth) return;
    const float* from = s.at + row * s.row_stride + k * s.k_stride;
    if (s.wide) {
      first = reinterpret_cast<const float4*>(from)[0];
      second = reinterpret_cast<const float4*>(from)[1];
      return;
    }
    first = ark_four_narrow(from, s.k_stride, s.depth - k);
    second = ark_four_narrow(from + 4 * s.k_stride, s.k_stride, s.depth - k - 4);
  }
  ARK_DEVICE_MEMBER void keep(char* to, int part) const {
    const float v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    ark_u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const ark_bf16 a = ark_bfloat(v[2 * i]), b = ark_bfloat(v[2 * i + 1]);
      high[i] = ark_pack(a.bits, b.bits);
      low[i] = ark_pack(ark_bfloat(v[2 * i] - ark_float(a)).bits,
                        ark_bfloat(v[2 * i + 1] - ark_float(b)).bits);
    }
    *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(to + part) = make_uint4(low[0], low[1], low[2], low[3]);
  }
};

// Computes a tile of 16 * MB rows and 8 * NB * WN columns. WN warps are side by side, each with NB
// blocks of 8 columns. Along k, KS warps divide a chunk of 32 * KS elements.
template <int MB, int NB, int WN, int KS, bool ALONG_K, typename TA, typename TB, typename TO>
ARK_DEVICE void ark_matrix_tile(char* scratch, const ArkSide<TA>& a, const ArkSide<TB>& b, TO* out,
                                ark_i64 out_row, ark_i64 out_column) {
  constexpr int ROWS = 16 * MB, KC = 32 * KS, PITCH = 2 * (KC + 32), PART = ROWS * PITCH;
  constexpr int PIECES = (ROWS * KC / 8 + ARK_THREADS - 1) / ARK_THREADS;
  constexpr int PARTS = ArkEight<TA>::PARTS;
  const int g = ark_lane() / 4, t = ark_lane() % 4;
  const int slice = ark_warp() / WN, first_column = ark_warp() % WN * NB * 8 + g;
  const bool busy = slice < KS;
  ArkEight<TA> next_a[PIECES] = {};
  uint4 next_b[NB] = {};
  const auto place = [](int i, int& row, int& k) {
    const int e = ark_tid() + i * ARK_THREADS;
    row = ALONG_K ? e / (KC / 8) : e % ROWS;
    k = (ALONG_K ? e % (KC / 8) : e / ROWS) * 8;
    return e < ROWS * KC / 8;
  };
  const auto load = [&](int k0) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      int row, k;
      if (place(i, row, k)) next_a[i].load(a, row, k0 + k);
    }
#pragma unroll
    for (int n = 0; n < NB; ++n) {
      if (busy) next_b[n] = ark_eight(b, first_column + n * 8, k0 + slice * 32 + t * 8);
    }
  };
  float sum[MB][NB][4] = {};
  load(0);
  for (int k0 = 0; k0 < a.depth; k0 += KC) {
    ark_sync();
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      int row, k;
      if (place(i, row, k)) next_a[i].keep(scratch + row * PITCH + 2 * k, PART);
    }
    uint4 now_b[NB];
#pragma unroll
    for (int n = 0; n < NB; ++n) now_b[n] = next_b[n];
    ark_sync();
    if (k0 + KC < a.depth) load(k0 + KC);
    if (!busy) continue;
#pragma unroll
    for (int m = 0; m < MB; ++m) {
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        const char* from = scratch + part * PART + (m * 16 + g) * PITCH + 64 * slice + 16 * t;
        const uint4 u = *reinterpret_cast<const uint4*>(from);
        const uint4 v = *reinterpret_cast<const uint4*>(from + 8 * PITCH);
#pragma unroll
        for (int n = 0; n < NB; ++n) {
          ark_mma(sum[m][n], u.x, v.x, u.y, v.y, now_b[n].x, now_b[n].y, b.at);
          ark_mma(sum[m][n], u.z, v.z, u.w, v.w, now_b[n].z, now_b[n].w, b.at);
        }
      }
    }
  }
  // The warps that divide k store their sums next to each other. Then each thread adds up the sums
  // of one element of the tile.
  constexpr int COLUMNS = WN * NB * 8;
  float* sums = reinterpret_cast<float*>(scratch);
  ark_sync();
  if (busy) {
#pragma unroll
    for (int m = 0; m < MB; ++m) {
#pragma unroll
      for (int n = 0; n < NB; ++n) {
        float* to = sums + (slice * ROWS + m * 16 + g) * COLUMNS + first_column - g + n * 8 + 2 * t;
        to[0] = sum[m][n][0], to[1] = sum[m][n][1];
        to[8 * COLUMNS] = sum[m][n][2], to[8 * COLUMNS + 1] = sum[m][n][3];
      }
    }
  }
  ark_sync();
  for (int e = ark_tid(); e < ROWS * COLUMNS; e += ARK_THREADS) {
    const int row = e / COLUMNS, column = e % COLUMNS;
    if (row >= a.rows || column >= b.rows) continue;
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < KS; ++s) total += sums[s * ROWS * COLUMNS + e];
    ark_put(out, row * out_row + column * out_column, total);
  }
}
