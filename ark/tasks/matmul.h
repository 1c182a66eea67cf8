// Matrix products by ordinary multiply-add instructions, for machines without matrix units and for
// operand types that they do not support. A task computes the tile of ROWS by COLUMNS elements that
// begins at row m0 and column n0. a(m, k) and b(k, n) are addresses of elements, finish(m, n, sum)
// stores a result. Sums are over k0 to k1.

// ark_factor: an element converted to the type in which it is multiplied and summed: floating-point
// types as float, int8 as 32-bit integers that wrap around.
template <typename T>
ARK_DEVICE float ark_factor(const T* p) {
  return ark_get(p, 0);
}
ARK_DEVICE ark_i32 ark_factor(const signed char* p) { return *p; }
ARK_DEVICE void ark_add_product(float& sum, float a, float b) { sum += a * b; }
ARK_DEVICE void ark_add_product(ark_i32& sum, ark_i32 a, ark_i32 b) {
  sum = static_cast<ark_i32>(static_cast<ark_u32>(sum) + static_cast<ark_u32>(a * b));
}
ARK_DEVICE float ark_other_sum(float v, int mask) { return ark_shfl_xor(v, mask); }
ARK_DEVICE ark_i32 ark_other_sum(ark_i32 v, int mask) {
  return static_cast<ark_i32>(ark_shfl_xor(static_cast<ark_u32>(v), mask));
}

// The number of lanes (a power of two) among which the sum for each element is divided if a tile
// has fewer elements than threads.
constexpr int ark_matmul_lanes(int elements) {
  int lanes = 1;
  while (2 * lanes * elements <= ARK_THREADS && 2 * lanes <= ARK_LANES) lanes *= 2;
  return lanes;
}

// Computes a lane's part of the sum over k of element (m, n) of the result. The products are
// divided among LANES lanes. If V is 1, a lane has every LANES-th product. If V > 1, it has every
// LANES-th pack of V products, whose elements are neighbours in both matrices.
template <int LANES, int V, typename Sum, class A, class B>
ARK_DEVICE Sum ark_lane_sum(int m, int n, int k0, int k1, const A& a, const B& b) {
  const int lane = ark_tid() % LANES;
  Sum sum = 0;
  if constexpr (V > 1) {
    const auto* left = a(m, k0);
    const auto* right = b(k0, n);
#pragma unroll 8
    for (int k = lane * V; k < k1 - k0; k += LANES * V) {
      const auto x = ark_load_pack<V>(left + k);
      const auto y = ark_load_pack<V>(right + k);
#pragma unroll
      for (int j = 0; j < V; ++j) ark_add_product(sum, ark_factor(x.v + j), ark_factor(y.v + j));
    }
  } else {
    for (int k = k0 + lane; k < k1; k += LANES) {
      ark_add_product(sum, ark_factor(a(m, k)), ark_factor(b(k, n)));
    }
  }
  return sum;
}

// Computes a tile of ROWS by COLUMNS sums of an M by N product, by all threads of the block, over k
// from k0 to k1. a(m, k) and b(k, n): addresses of elements. finish(m, n, sum): stores a result. If
// the addresses are aligned, packs of V elements along k are loaded.
template <int ROWS, int COLUMNS, int M, int N, int V, class A, class B, class Finish>
ARK_DEVICE void ark_matmul(ArkCtx&, const ArkTask&, int m0, int n0, int k0, int k1, const A& a,
                           const B& b, const Finish& finish, ark_u64 addresses) {
  constexpr int LANES = ark_matmul_lanes(ROWS * COLUMNS);
  typedef decltype(ark_factor(a(0, 0))) Sum;
  if constexpr (LANES > 1) {
    const int e = ark_tid() / LANES, m = m0 + e / COLUMNS, n = n0 + e % COLUMNS;
    const bool here = e < ROWS * COLUMNS && m < M && n < N;
    Sum sum = 0;
    if (here && V > 1 && ark_aligned(addresses)) {
      sum = ark_lane_sum<LANES, V, Sum>(m, n, k0, k1, a, b);
    } else if (here) {
      sum = ark_lane_sum<LANES, 1, Sum>(m, n, k0, k1, a, b);
    }
    for (int mask = 1; mask < LANES; mask *= 2) sum += ark_other_sum(sum, mask);
    if (here && ark_tid() % LANES == 0) finish(m, n, sum);
    return;
  }
  for (int e = ark_tid(); e < ROWS * COLUMNS; e += ARK_THREADS) {
    const int m = m0 + e / COLUMNS, n = n0 + e % COLUMNS;
    if (m >= M || n >= N) continue;
    Sum sum = 0;
    for (int k = k0; k < k1; ++k) ark_add_product(sum, ark_factor(a(m, k)), ark_factor(b(k, n)));
    finish(m, n, sum);
  }
}

// The number of elements along k of both matrices that shared memory holds at a time.
constexpr int ark_matmul_depth(int k) { return k < 64 ? k : 64; }

// The number of lanes among which k is divided, so that a tile with few results uses many threads.
// units: the number of threads needed if k is not divided.
constexpr int ark_matmul_shares(int units) {
  int lanes = 1;
  while (2 * lanes * units <= ARK_THREADS && lanes < 8) lanes *= 2;
  return lanes;
}

// Like ark_matmul, for 8-bit and 4-bit floats. Both matrices are first copied to shared memory, in
// the order of their elements in global memory. A thread computes R rows of a column. A_ALONG,
// B_ALONG: true if a (or b) is contiguous along k in memory.
template <int ROWS, int COLUMNS, int M, int N, int K, int R, bool A_ALONG, bool B_ALONG, class A,
          class B, class Finish>
ARK_DEVICE void ark_matmul_staged(ArkCtx& c, const ArkTask&, int m0, int n0, const A& a, const B& b,
                                  const Finish& finish) {
  constexpr int DEPTH = ark_matmul_depth(K), BANDS = (ROWS + R - 1) / R, UNITS = BANDS * COLUMNS;
  constexpr int LANES = ark_matmul_shares(UNITS), PASSES = (UNITS * LANES - 1) / ARK_THREADS + 1;
  constexpr int PITCH = DEPTH + LANES + (LANES == 1 && DEPTH % 2 != 0 ? 1 : 0);
  float* left = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float* right = left + BANDS * R * PITCH;
  const int lane = ark_tid() % LANES;
  float sums[PASSES][R];
#pragma unroll
  for (int p = 0; p < PASSES; ++p) {
#pragma unroll
    for (int r = 0; r < R; ++r) sums[p][r] = 0.0f;
  }
  for (int k0 = 0; k0 < K; k0 += DEPTH) {
    if (k0 > 0) ark_sync();
#pragma unroll 4
    for (int e = ark_tid(); e < BANDS * R * DEPTH; e += ARK_THREADS) {
      const int row = A_ALONG ? e / DEPTH : e % (BANDS * R),
                k = A_ALONG ? e % DEPTH : e / (BANDS * R);
      const bool here = row < ROWS && m0 + row < M && k0 + k < K;
      left[row * PITCH + k] = here ? ark_get(a(m0 + row, k0 + k), 0) : 0.0f;
    }
#pragma unroll 4
    for (int e = ark_tid(); e < COLUMNS * DEPTH; e += ARK_THREADS) {
      const int column = B_ALONG ? e / DEPTH : e % COLUMNS, k = B_ALONG ? e % DEPTH : e / COLUMNS;
      const bool here = n0 + column < N && k0 + k < K;
      right[column * PITCH + k] = here ? ark_get(b(k0 + k, n0 + column), 0) : 0.0f;
    }
    ark_sync();
#pragma unroll
    for (int p = 0; p < PASSES; ++p) {
      const int unit = (p * ARK_THREADS + ark_tid()) / LANES;
      if (unit >= UNITS) continue;
      const float* own = right + unit % COLUMNS * PITCH;
      const float* rows = left + unit / COLUMNS * R * PITCH;
#pragma unroll 8
      for (int k = lane; k < DEPTH; k += LANES) {
        const float v = own[k];
#pragma unroll
        for (int r = 0; r < R; ++r) sums[p][r] += rows[r * PITCH + k] * v;
      }
    }
  }
#pragma unroll
  for (int p = 0; p < PASSES; ++p) {
    const int unit = (p * ARK_THREADS + ark_tid()) / LANES;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      for (int mask = 1; mask < LANES; mask *= 2) sums[p][r] += ark_shfl_xor(sums[p][r], mask);
      const int row = unit / COLUMNS * R + r, n = n0 + unit % COLUMNS;
      const bool here = unit < UNITS && lane == 0 && row < ROWS && m0 + row < M && n < N;
      if (here) finish(m0 + row, n, sums[p][r]);
    }
  }
}

// ark_matmul for blocks of one thread. The thread adds up rows of b, each multiplied by one element
// of a, because rows of b are contiguous.
template <int ROWS, int COLUMNS, int M, int N, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_alone(ArkCtx& c, const ArkTask&, int m0, int n0, int k0, int k1,
                                 const A& a, const B& b, const Finish& finish) {
  typedef decltype(ark_factor(a(0, 0))) Sum;
  Sum* sums = reinterpret_cast<Sum*>(ARK_SCRATCH(c));
  const int m1 = m0 + ROWS < M ? m0 + ROWS : M, n1 = n0 + COLUMNS < N ? n0 + COLUMNS : N;
  for (int m = m0; m < m1; ++m) {
    for (int j = 0; j < COLUMNS; ++j) sums[j] = 0;
    for (int k = k0; k < k1; ++k) {
      const Sum left = ark_factor(a(m, k));
      for (int n = n0; n < n1; ++n) ark_add_product(sums[n - n0], left, ark_factor(b(k, n)));
    }
    for (int n = n0; n < n1; ++n) finish(m, n, sums[n - n0]);
  }
}

// Like ark_matmul_alone, for epilogues that need two columns of the product at once: finish(m, n,
// sum, next) gets the sums of columns n and n + DISTANCE.
template <int ROWS, int COLUMNS, int M, int N, int DISTANCE, class A, class B, class Finish>
ARK_DEVICE void ark_matmul_pairs(ArkCtx&, const ArkTask&, int m0, int n0, int k0, int k1,
                                 const A& a, const B& b, const Finish& finish) {
  for (int e = ark_tid(); e < ROWS * COLUMNS / 2; e += ARK_THREADS) {
    const int pair = e % (COLUMNS / 2), m = m0 + e / (COLUMNS / 2);
    const int n = n0 + pair / DISTANCE * 2 * DISTANCE + pair % DISTANCE;
    if (m >= M || n >= N) continue;
    float sum = 0.0f, next = 0.0f;
    for (int k = k0; k < k1; ++k) {
      const float left = ark_get(a(m, k), 0);
      sum += left * ark_get(b(k, n), 0);
      next += left * ark_get(b(k, n + DISTANCE), 0);
    }
    finish(m, n, sum, next);
  }
}
