// The prologue (operation on the input) and the epilogue (operation on the sums) of linear layers,
// for the bodies of all backends. linear.py describes operands and tasks. Epilogues that few layers
// have are in gates.h, linear_rope.h and linear_sample.h.

// An operand that is the sum of S shares (partial results of ranks), of M rows each. Share number
// `first` is added first, then the next ones in cyclic order. Row m of share s is row s M + m of
// `shares`.
template <int S, int M, class A>
struct ArkSummed {
  static constexpr bool packets = A::packets;
  A shares;
  int first;
};
template <int S, int M, class A>
ARK_DEVICE ArkSummed<S, M, A> ark_summed(A shares, int first) {
  return {shares, first};
}
template <int S, int M, class A>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkSummed<S, M, A>& x, int i0, int i1, int i2, int i3) {
  float sum = ark_load(c, x.shares, i0, i1, x.first * M + i2, i3);
  for (int s = 1; s < S; ++s) {
    const int share = x.first + s < S ? x.first + s : x.first + s - S;
    sum += ark_load(c, x.shares, i0, i1, share * M + i2, i3);
  }
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

// An operand for which a task must wait even if it does not use the value. A load waits for the
// value, and returns the value if `counts` is true, otherwise zero.
template <class A>
struct ArkAwaited {
  static constexpr bool packets = A::packets;
  A value;
  bool counts;
};
template <class A>
ARK_DEVICE ArkAwaited<A> ark_awaited(A value, bool counts) {
  return {value, counts};
}
template <class A>
ARK_DEVICE float ark_load(ArkCtx& c, const ArkAwaited<A>& x, int i0, int i1, int i2, int i3) {
  const float value = ark_load(c, x.value, i0, i1, i2, i3);
  return x.counts ? value : 0.0f;
}

// The prologues of a linear layer: ArkPlain leaves the input unchanged; the other divides each row
// by its root mean square (rmsnorm).
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

// The epilogues: operations on the sums of a linear layer before they are stored. Each processes
// the sums of WIDTH neighbouring rows of the weights at a time.
//
// ark_sums_ahead loads the other values that an epilogue needs while the weights are still being
// loaded: for M rows of the input, from row `first` on, and R rows of the weights, from row n on,
// of which `rows` exist. WAITS: true if these loads must come after the task's waits. If it is
// false, they read packets or data from before the iteration (the operands of TaskKind.early), and
// may come before the waits.
template <class O>
struct ArkStoreSums {
  static constexpr int WIDTH = 1;
  static constexpr bool WAITS = false;
  O output;
};
template <class O, class A>
struct ArkAddSums {
  static constexpr int WIDTH = 1;
  static constexpr bool WAITS = !A::packets;
  O output;
  A residual;
};
// The epilogue E with a bias that is added to the sums before E is applied.
template <class E, class B>
struct ArkBiasedSums {
  static constexpr int WIDTH = E::WIDTH;
  static constexpr bool WAITS = E::WAITS;
  E end;
  B bias;
};
template <class E, class B>
ARK_DEVICE ArkBiasedSums<E, B> ark_biased_sums(E end, B bias) {
  return {end, bias};
}
template <class O>
ARK_DEVICE ArkStoreSums<O> ark_store_sums(O output) {
  return {output};
}
template <class O, class A>
ARK_DEVICE ArkAddSums<O, A> ark_add_sums(O output, A residual) {
  return {output, residual};
}

template <class E, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx&, const E&, int, int, int, float (&)[M][R]) {}
template <class O, class A, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx& c, const ArkAddSums<O, A>& e, int first, int n, int rows,
                               float (&ahead)[M][R]) {
  for (int m = 0; m < M; ++m) {
    for (int r = 0; r < R; ++r) {
      if (r < rows) ahead[m][r] = ark_load(c, e.residual, 0, 0, first + m, n + r);
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

// Stores the result that an epilogue computes over all rows, if it has one (the best candidate for
// the next token). Called by all threads after all rows were stored. red: 2 * ARK_WARPS words of
// shared memory that nothing else uses.
template <class E>
ARK_DEVICE void ark_sums_finish(ArkCtx&, const ArkTask&, E&, float*) {}

// Loads the operands of the epilogue E before the sums are complete. The bias is loaded only when
// they are complete.
template <class E, class B, int M, int R>
ARK_DEVICE void ark_sums_ahead(ArkCtx& c, const ArkBiasedSums<E, B>& e, int first, int n, int rows,
                               float (&ahead)[M][R]) {
  ark_sums_ahead(c, e.end, first, n, rows, ahead);
}
template <class E, class B, int R>
ARK_DEVICE void ark_sums_store(ArkCtx& c, ArkBiasedSums<E, B>& e, int m, int n, int rows,
                               const float (&sum)[R], const float (&ahead)[R]) {
  float biased[R];
  for (int r = 0; r < R; ++r) {
    biased[r] = r < rows ? sum[r] + ark_load(c, e.bias, 0, 0, 0, n + r) : sum[r];
  }
  ark_sums_store(c, e.end, m, n, rows, biased, ahead);
}
template <class E, class B>
ARK_DEVICE void ark_sums_finish(ArkCtx& c, const ArkTask& t, ArkBiasedSums<E, B>& e, float* red) {
  ark_sums_finish(c, t, e.end, red);
}
