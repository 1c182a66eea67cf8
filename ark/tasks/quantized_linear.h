// Products of rows with weights of 4 or 8 bits and group scales. quantized_linear.py describes
// operands and tasks.

// The zero point of a group, which is subtracted from its codes; 0 if there are no zero points.
template <class Z>
ARK_DEVICE float ark_zero_point(const Z& zeros, int row, int group) {
  if constexpr (Z::given) {
    return ark_get(ark_address(zeros, 0, 0, row, group), 0);
  } else {
    return 0.0f;
  }
}

// ark_load_few loads eight neighbouring elements of 4 or 8 bits, from `p` on, without converting
// them. ark_few_bits converts the loaded element j to float.
template <int ITEMS, typename T>
ARK_DEVICE ArkPack<T, ITEMS> ark_load_few(const T* p) {
  return ark_load_pack<ITEMS>(p);
}
template <typename T, int ITEMS>
ARK_DEVICE float ark_few_bits(const ArkPack<T, ITEMS>& pack, int j) {
  return static_cast<float>(ark_element(pack.v, j));
}
// Eight elements of 4 bits are loaded as a 32-bit word. To convert a code to float, the code is put
// into the low mantissa bits of the float 2^23, and 2^23 is subtracted, which takes fewer
// instructions than a conversion. For signed codes the sign bit is flipped, which adds 8, and 8 is
// subtracted again.
template <int SIGN>
struct ArkFourBits {
  ark_u32 word;
};
template <int ITEMS>
ARK_DEVICE ArkFourBits<0> ark_load_few(const ark_uint4* p) {
  return {*reinterpret_cast<const ark_u32*>(p)};
}
template <int ITEMS>
ARK_DEVICE ArkFourBits<8> ark_load_few(const ark_int4* p) {
  return {*reinterpret_cast<const ark_u32*>(p)};
}
template <int SIGN>
ARK_DEVICE float ark_few_bits(const ArkFourBits<SIGN>& few, int j) {
  const ark_u32 code = (few.word ^ SIGN * 0x11111111u) >> 4 * j & 15u;
#if defined(ARK_VECTOR_BYTES)
  // With options such as -fassociative-math the compiler would add the zero point to 2^23 first and
  // lose its fractional part. So here the code is converted as an integer.
  return static_cast<float>(static_cast<int>(code) - SIGN);
#else
  return ark_bits_float(code | 0x4b000000u) - (8388608.0f + SIGN);
#endif
}

constexpr int ark_quantized_step = 8;  // ELEMENTS_PER_LANE of quantized_linear.py

// The index in shared memory of element k of row m of the input. The elements with the same k of V
// rows are neighbours. They are followed by the elements that the other lanes of a warp read at the
// same time, so that a warp reads contiguous memory. TURNED: true if, of each group of eight
// elements, the even ones are stored before the odd ones, as in rows of a quantised matrix.
template <int V, int GROUPS, bool TURNED>
ARK_DEVICE int ark_quantized_place(int m, int k) {
  constexpr int STEP = ark_quantized_step, WIDE = ARK_LANES * STEP;
  const int in = TURNED ? k % 2 * (STEP / 2) + k % STEP / 2 : k % STEP;
  const int line = (k / WIDE * STEP + in) * GROUPS + m / V;
  return (line * ARK_LANES + k / STEP % ARK_LANES) * V + m % V;
}

// Adds products to sum[r], for R rows of the weights: the weights (few[r] - least[r]) * scale[r],
// each multiplied with GROUPS times V rows of x.
template <int R, int GROUPS, int V, class P>
ARK_DEVICE void ark_quantized_products(const P (&few)[R], const float (&least)[R],
                                       const float (&scale)[R], const float* line,
                                       float (&sum)[R][GROUPS * V]) {
  constexpr int STEP = ark_quantized_step;
#if defined(ARK_VECTOR_BYTES)
  typedef float Line __attribute__((vector_size(4 * GROUPS * V), aligned(4)));
  float w[R][STEP];
  Line total[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    ARK_VECTOR_LOOP
    for (int j = 0; j < STEP; ++j) w[r][j] = (ark_few_bits(few[r], j) - least[r]) * scale[r];
    total[r] = *reinterpret_cast<const Line*>(sum[r]);
  }
#pragma GCC unroll 8
  for (int j = 0; j < STEP; ++j) {
    const Line some = *reinterpret_cast<const Line*>(line + j * GROUPS * V);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) total[r] += w[r][j] * some;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) *reinterpret_cast<Line*>(sum[r]) = total[r];
#else
#pragma unroll
  for (int j = 0; j < STEP; ++j) {
    float w[R];
#pragma unroll
    for (int r = 0; r < R; ++r) w[r] = (ark_few_bits(few[r], j) - least[r]) * scale[r];
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
      const auto some = ark_load_pack<V>(line + (j * GROUPS + g) * ARK_LANES * V);
#pragma unroll
      for (int r = 0; r < R; ++r) {
#pragma unroll
        for (int v = 0; v < V; ++v) sum[r][g * V + v] += w[r] * some.v[v];
      }
    }
  }
#endif
}

// Multiplies x by rows of quantised weights. Task coordinates: first row of the weights, and last
// row + 1. x has M rows of K elements. CHUNK elements of each row of x are in shared memory at a
// time, while the next CHUNK elements are loaded. A warp processes R rows of the weights at a time.
// A lane reads eight elements of each of them, which are ITEMS items of the weights' storage type.
// PITCH: the distance between rows of the weights.
template <int M, int K, int CHUNK, int R, int GROUP, int ITEMS, int PITCH, bool TURNED, class X,
          class W, class S, class Z, class O>
ARK_DEVICE void ark_quantized_linear(ArkCtx& c, const ArkTask& t, X x, W weights, S scales, Z zeros,
                                     O output) {
  if constexpr (R > 1) {
    if (t.coord[1] - t.coord[0] < R) {  // fewer than R rows
      ark_quantized_linear<M, K, CHUNK, 1, GROUP, ITEMS, PITCH, TURNED>(c, t, x, weights, scales,
                                                                        zeros, output);
      return;
    }
  }
  constexpr int STEP = ark_quantized_step, WIDE = ARK_LANES * STEP, PARTS = (K + CHUNK - 1) / CHUNK;
  constexpr int V = M > 2 ? 4 : M, GROUPS = (M + V - 1) / V, SIZE = GROUPS * V * CHUNK;
  constexpr int EACH = PARTS > 1 ? (M * CHUNK + ARK_THREADS - 1) / ARK_THREADS : 1;
  typedef decltype(ark_load_few<ITEMS>(weights.p)) Pack;
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const auto element = [&](int part, int i) -> float {
    const int k = part * CHUNK + i % CHUNK;
    return i < M * CHUNK && k < K ? ark_load(c, x, 0, 0, i / CHUNK, k) : 0.0f;
  };
  const auto keep = [&](int part, int i, float v) {
    const int at = ark_quantized_place<V, GROUPS, TURNED>(i / CHUNK, i % CHUNK);
    if (i < M * CHUNK) xs[(part & 1) * SIZE + at] = v;
  };
  for (int first = t.coord[0]; first < t.coord[1]; first += ARK_WARPS * R) {
    const int mine = first + ark_warp() * R;
    // If fewer than R rows are left, the last R rows of the task are computed. Some of them have
    // been computed before and are not stored again.
    const int row = mine + R > t.coord[1] ? t.coord[1] - R : mine;
    const auto* bits = weights.p + static_cast<ark_i64>(row) * PITCH;
    Pack ahead[R] = {};
    float factor[R] = {}, zero[R] = {}, sum[R][GROUPS * V] = {};
    const auto fetch = [&](int k) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        ahead[r] = ark_load_few<ITEMS>(bits + k / STEP * ITEMS + r * PITCH);
        factor[r] = ark_get(ark_address(scales, 0, 0, row + r, k / GROUP), 0);
        zero[r] = ark_zero_point(zeros, row + r, k / GROUP);
      }
    };
    int k = ark_lane() * STEP;
    if (k < K) fetch(k);
    for (int part = 0; part < PARTS; ++part) {
      if (part == 0 && (PARTS > 1 || first == t.coord[0])) {
        ark_sync();
        for (int i = ark_tid(); i < M * CHUNK; i += ARK_THREADS) keep(0, i, element(0, i));
        ark_sync();
      }
      float held[EACH];
      if (part + 1 < PARTS) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) held[e] = element(part + 1, e * ARK_THREADS + ark_tid());
      }
      const float* here = xs + (part & 1) * SIZE + ark_lane() * V;
      const int last = (part + 1) * CHUNK < K ? (part + 1) * CHUNK : K;
      for (; k < last && mine < t.coord[1]; k += WIDE) {
        Pack few[R];
        float least[R], scale[R];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          few[r] = ahead[r];
          least[r] = zero[r];
          scale[r] = factor[r];
        }
        if (k + WIDE < K) fetch(k + WIDE);
        const float* line = here + (k - part * CHUNK) / WIDE * (WIDE * GROUPS * V);
        ark_quantized_products<R, GROUPS, V>(few, least, scale, line, sum);
      }
      if (part + 1 < PARTS) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) keep(part + 1, e * ARK_THREADS + ark_tid(), held[e]);
        ark_sync();
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int m = 0; m < M; ++m) {
        const float total = ark_warp_sum(sum[r][m]);
        const int n = row + r;
        if (ark_lane() == 0 && n >= mine && n < t.coord[1])
          ark_publish(c, output, 0, 0, m, n, total);
      }
    }
  }
}
