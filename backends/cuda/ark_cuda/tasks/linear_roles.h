// One row through a linear layer in the variant `roles`: the computing warps load the input into
// shared memory together, in the weights' type (as matrix units take it), then each warp takes its
// own stages of the ring, folds a stage's rows and publishes them, and goes on to the next.

ARK_DEVICE void ark_narrow(float* to, float a, float b) { to[0] = a, to[1] = b; }
ARK_DEVICE void ark_narrow(ark_bf16* to, float a, float b) {
  ark_u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  *reinterpret_cast<ark_u32*>(to) = pair;
}
ARK_DEVICE void ark_narrow(ark_f16* to, float a, float b) {
  ark_u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
  *reinterpret_cast<ark_u32*>(to) = pair;
}

// Pairs of a row that a thread loads.
template <int K>
constexpr int ARK_ROW_PAIRS = (K / 2 + ARK_THREADS - 1) / ARK_THREADS;

// The norm's weights for this thread's pairs.
template <int K, typename T>
ARK_DEVICE void ark_row_factors(const T* norm, float (&factor)[2 * ARK_ROW_PAIRS<K>]) {
#pragma unroll
  for (int i = 0; i < ARK_ROW_PAIRS<K>; ++i) {
    const int at = 2 * (i * ARK_THREADS + ark_tid());
    factor[2 * i] = at < K ? ark_get(norm, at) : 0.0f;
    factor[2 * i + 1] = at < K ? ark_get(norm, at + 1) : 0.0f;
  }
}

// Loads a row of K elements, the sum of S shares of it, times `factor` if NORM, to xs; returns the
// sum of this thread's squares.
template <int K, int S, bool NORM, typename P, typename T, int F>
ARK_DEVICE float ark_row(ArkCtx& c, const P* p, const float (&factor)[F], T* xs, bool system) {
  constexpr int ALL = ARK_ROW_PAIRS<K>, MOST = S < 12 ? 12 / S : 1, N = ALL < MOST ? ALL : MOST;
  float square = 0.0f;
#pragma unroll
  for (int first = 0; first < ALL; first += N) {
    float v[2 * N * S];
    const auto place = [&](int i) { return 2 * ((first + i) * ARK_THREADS + ark_tid()); };
    const auto at = [&](int i) -> const P* {
      return place(i / S) < K ? p + i % S * K + place(i / S) : nullptr;
    };
    ark_load_pairs<N * S>(c, p, at, v, system);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (place(i) >= K) continue;
      float a = v[2 * i * S], b = v[2 * i * S + 1];
#pragma unroll
      for (int s = 1; s < S; ++s) a += v[2 * (i * S + s)], b += v[2 * (i * S + s) + 1];
      if constexpr (NORM) {
        square = fmaf(a, a, fmaf(b, b, square));
        a *= factor[2 * (first + i)], b *= factor[2 * (first + i) + 1];
      }
      ark_narrow(xs + place(i), a, b);
    }
  }
  return square;
}

// This lane's share of the products of R rows of K weights, `pitch` apart, with x; all in shared
// memory. Few rows have several running sums each.
template <int R, int K, typename T>
ARK_DEVICE void ark_stage_dots(const T* w, const T* x, float (&sum)[R]) {
  constexpr int E = 16 / sizeof(T), A = R == 1 ? 4 : R == 2 ? 2 : 1;
  float part[R][A] = {};
#pragma unroll 8
  for (int i = ark_lane() * E; i < K; i += 32 * E) {
    float xs[E];
    ark_unpack(xs, *reinterpret_cast<const uint4*>(x + i), x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float ws[E];
      ark_unpack(ws, *reinterpret_cast<const uint4*>(w + r * K + i), w);
#pragma unroll
      for (int e = 0; e < E; ++e) part[r][e % A] = fmaf(ws[e], xs[e], part[r][e % A]);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sum[r] = part[r][0];
#pragma unroll
    for (int a = 1; a < A; ++a) sum[r] += part[r][a];
  }
}

// The sum of one part of a row that is cut along k: true for the warp that adds the last one, which
// gets the row's total, summed in order.
template <int P>
ARK_DEVICE bool ark_row_total(float sum, int row, int number, float* parts, ark_u32* counts,
                              float& total) {
  ark_u32 before = 0u;
  if (ark_lane() == 0) {
    *const_cast<volatile float*>(&parts[row * P + number]) = sum;
    __threadfence_block();
    before = atomicAdd(&counts[row], 1u);
    __threadfence_block();
  }
  if (__shfl_sync(0xffffffffu, before, 0) != P - 1) return false;
  total = 0.0f;
#pragma unroll
  for (int i = 0; i < P; ++i) total += *const_cast<volatile float*>(&parts[row * P + i]);
  return true;
}
