// Linear layers on the operand stream, for backends without a body of their own. What a task
// computes and touches is said in linear.py.

// An operand of S shares of M rows, of which a reader wants the sum; share s has row m as its row
// s M + m.
template <int S, int M, class A>
struct ArkSummed {
  A shares;
};
template <int S, int M, class A>
ARK_DEVICE ArkSummed<S, M, A> ark_summed(A shares) {
  return {shares};
}
template <int S, int M, class A>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkSummed<S, M, A>& x, int i0, int i1, int i2, int i3) {
  float sum = ark_load(c, x.shares, i0, i1, i2, i3);
  for (int s = 1; s < S; ++s) sum += ark_load(c, x.shares, i0, i1, s * M + i2, i3);
  return sum;
}
template <bool SCALED, int S, int M, class A>
ARK_DEVICE float ark_load_row(ArkCtx& c, const ArkSummed<S, M, A>& x, int i2, int n, float* to) {
  float squares = 0.0f;
  for (int k = ark_tid(); k < n; k += ARK_THREADS) {
    squares += ark_store_scaled<SCALED>(ark_load(c, x, 0, 0, i2, k), to + k);
  }
  return squares;
}

// Two places of one result.
template <class A, class B>
struct ArkBoth {
  A first;
  B second;
};
template <class A, class B>
ARK_DEVICE ArkBoth<A, B> ark_both(A first, B second) {
  return {first, second};
}
template <class A, class B>
ARK_DEVICE void ark_publish(ArkCtx& c, const ArkBoth<A, B>& x, int i0, int i1, int i2, int i3,
                            float v) {
  ark_publish(c, x.first, i0, i1, i2, i3, v);
  ark_publish(c, x.second, i0, i1, i2, i3, v);
}

// What is done to the input before the product: nothing, or a norm by its root mean square.
struct ArkPlain {
  static constexpr bool norm = false;
};
template <class W>
struct ArkRmsNormed {
  static constexpr bool norm = true;
  W weight;
  float eps;
};
template <class W>
ARK_DEVICE ArkRmsNormed<W> ark_rms_normed(W weight, float eps) {
  return {weight, eps};
}

// What is done to the sums. A lane prepares `ahead` while its stage is on the way, for R rows of
// the weights from row n on, of which `rows` are there.
template <class O>
struct ArkStoreSums {
  O output;
};
template <class O, class A>
struct ArkAddSums {
  O output;
  A residual;
};
template <class O>
struct ArkSwigluSums {
  O output;
};
template <class O>
struct ArkSampleSums {
  O output;
  float temperature;
  ark_u32 seed;
  ark_u32 place;
  float* best;  // this thread's, and its token
  ark_u32* token;
};
template <class R>
struct ArkRopeSums {
  R rope;
};
template <class O>
ARK_DEVICE ArkStoreSums<O> ark_store_sums(O output) {
  return {output};
}
template <class O, class A>
ARK_DEVICE ArkAddSums<O, A> ark_add_sums(O output, A residual) {
  return {output, residual};
}
template <class O>
ARK_DEVICE ArkSwigluSums<O> ark_swiglu_sums(O output) {
  return {output};
}
template <class O>
ARK_DEVICE ArkSampleSums<O> ark_sample_sums(O output, float temperature, ark_u32 seed,
                                            ark_u32 place, float& best, ark_u32& token) {
  return {output, temperature, seed, place, &best, &token};
}
template <class R>
ARK_DEVICE ArkRopeSums<R> ark_rope_sums(R rope) {
  return {rope};
}

template <class E, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const E&, int, int, float (&)[M][R]) {}
template <class O, class A, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx& c, const ArkAddSums<O, A>& e, int n, int rows,
                               float (&ahead)[M][R]) {
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      if (r < rows) ahead[m][r] = ark_load(c, e.residual, 0, 0, m, n + r);
    }
  }
}
template <class T, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const ArkRopeSums<T>& e, int n, int rows,
                               float (&ahead)[M][R]) {
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; r += 2) {
      if (r >= rows || n + r >= T::ROTATED) continue;
      const float angle = ark_rope_angle(e.rope, m, n + r);
      ahead[m][r] = ark_sin(angle);
      ahead[m][r + 1] = ark_cos(angle);
    }
  }
}

template <class O, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkStoreSums<O>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&)[R]) {
  for (int r = 0; r < R; ++r) {
    if (r < rows) ark_publish(c, e.output, 0, 0, m, n + r, sum[r]);
  }
}
template <class O, class A, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkAddSums<O, A>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&ahead)[R]) {
  for (int r = 0; r < R; ++r) {
    if (r < rows) ark_publish(c, e.output, 0, 0, m, n + r, sum[r] + ahead[r]);
  }
}
template <class O, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkSwigluSums<O>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&)[R]) {
  for (int r = 0; r < R; r += 2) {
    if (r < rows) ark_publish(c, e.output, 0, 0, m, (n + r) / 2, ark_swiglu(sum[r], sum[r + 1]));
  }
}
template <class O, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkSampleSums<O>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&)[R]) {
  for (int r = 0; r < R; ++r) {
    if (r >= rows) continue;
    ark_publish(c, e.output, 0, 0, m, n + r, sum[r]);
    const ark_u32 row = static_cast<ark_u32>(n + r);
    const float score = ark_score(sum[r], e.temperature, e.seed, e.place, row);
    if (score > *e.best) {
      *e.best = score;
      *e.token = row;
    }
  }
}
template <class T, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, const ArkRopeSums<T>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&ahead)[R]) {
  for (int r = 0; r < R; r += 2) {
    if (r >= rows) continue;
    float a = sum[r], b = sum[r + 1];
    if (n + r < T::ROTATED) ark_rotate(a, b, ahead[r], ahead[r + 1]);
    ark_rope_store(c, e.rope, m, n + r, a, b);
  }
}

// The M input rows of K elements to shared memory, and with a norm their scales.
template <int M, int K, class X, class P>
ARK_DEVICE void ark_linear_input(ArkCtx& c, X x, const P& prologue, float* xs, float (&scale)[M]) {
  if constexpr (P::norm) {
    // The weights of the norm are there before the input is; its scale waits for the end.
    for (int k = ark_tid(); k < K; k += ARK_THREADS) {
      const float v = ark_get(prologue.weight.p, k);
      for (int m = 0; m < M; ++m) xs[m * K + k] = v;
    }
    for (int m = 0; m < M; ++m) scale[m] = ark_load_row<true>(c, x, m, K, xs + m * K);
    for (int m = 0; m < M; ++m) {
      scale[m] = ark_rsqrt(ark_block_sum(scale[m], xs + M * K) / K + prologue.eps);
    }
  } else {
    for (int m = 0; m < M; ++m) ark_load_row<false>(c, x, m, K, xs + m * K);
  }
}

// coord: first and last+1 row of the weights, of type T, R rows to a stage. RAGGED: their number is
// no multiple of R.
template <typename T, int M, int K, int R, bool RAGGED, class X, class P, class E>
ARK_DEVICE void ark_linear(ArkCtx& c, const ArkTask& t, X x, const P& prologue, const E& epilogue) {
  float* xs = reinterpret_cast<float*>(ARK_SCRATCH(c));
  float scale[M];
  ark_linear_input<M, K>(c, x, prologue, xs, scale);
  ark_sync();
  ark_u32 stage = t.fetch_begin;
  for (int n = t.coord[0]; n < t.coord[1]; n += R, ++stage) {
    if (!ark_stage_mine(c, stage)) continue;
    const int rows = t.coord[1] - n < R ? t.coord[1] - n : R;
    float ahead[M][R] = {};
    if (ark_lane() == 0) ark_sums_ahead(c, epilogue, n, rows, ahead);
    const T* w = reinterpret_cast<const T*>(ark_stage(c, stage));
    float sum[M][R];
    for (int m = 0; m < M; ++m) {
      if (RAGGED && rows < R) {
        for (int r = 0; r < R; ++r) {
          if (r < rows) ark_dots<1>(w + r * K, K, xs + m * K, K, sum[m] + r);
        }
        continue;
      }
      ark_dots<R>(w, K, xs + m * K, K, sum[m]);
    }
    ark_stage_done(c, stage);
    if (ark_lane() != 0) continue;
    for (int m = 0; m < M; ++m) {
      if constexpr (P::norm) {
        for (int r = 0; r < R; ++r) sum[m][r] *= scale[m];
      }
      ark_sums_store(c, epilogue, m, n, rows, sum[m], ahead[m]);
    }
  }
}
