// Pairs, caches and places of greatest elements. What a task computes and touches is said in
// movement.py.

// Products of complex numbers that lie as pairs, in a tile of T0 x T1 x T2 x T3 elements of N0 x N1
// x N2 x N3. a, b and output give the place of a pair, of which the second element is SA, SB and SO
// further on.
template <int T0, int T1, int T2, int T3, int N0, int N1, int N2, int N3, ark_i64 SA, ark_i64 SB,
          ark_i64 SO, class A, class B, class O>
ARK_DEVICE void ark_multiply_pairs(ArkCtx&, const ArkTask& t, const A& a, const B& b,
                                   const O& output) {
  const int n0 = t.coord[0] + T0 < N0 ? T0 : N0 - t.coord[0];
  const int n1 = t.coord[1] + T1 < N1 ? T1 : N1 - t.coord[1];
  const int n2 = t.coord[2] + T2 < N2 ? T2 : N2 - t.coord[2];
  const int n3 = (t.coord[3] + T3 < N3 ? T3 : N3 - t.coord[3]) / 2;
  for (int e = ark_tid(); e < n0 * n1 * n2 * n3; e += ARK_THREADS) {
    int r = e;
    const int j = t.coord[3] + r % n3 * 2;
    r /= n3;
    const int i2 = t.coord[2] + r % n2;
    r /= n2;
    const int i1 = t.coord[1] + r % n1, i0 = t.coord[0] + r / n1;
    const auto* left = a(i0, i1, i2, j);
    const auto* right = b(i0, i1, i2, j);
    const float ar = ark_get(left, 0), ai = ark_get(left, SA);
    const float br = ark_get(right, 0), bi = ark_get(right, SB);
    auto* to = output(i0, i1, i2, j);
    ark_put(to, 0, ar * br - ai * bi);
    ark_put(to, SO, ar * bi + ai * br);
  }
}

// coord: head. Rows of x become those of a cache from the position on; what is outside is dropped.
template <int ROWS, int WIDTH, int CONTEXT, class X, class P, class C>
ARK_DEVICE void ark_kv_append(ArkCtx&, const ArkTask& t, X x, P position, C cache) {
  const int head = t.coord[0];
  for (int e = ark_tid(); e < ROWS * WIDTH; e += ARK_THREADS) {
    const int r = e / WIDTH, d = e % WIDTH, at = position.p[0] + r;
    if (at < 0 || at >= CONTEXT) continue;
    const float v = ark_get(ark_address(x, 0, 0, r, head * WIDTH + d), 0);
    ark_put(ark_address(cache, 0, head, at, d), 0, v);
  }
}

// The greatest of each row of COLUMNS elements, by a warp a row or by the block: a thread has U
// packs of V neighbours, the next ones on their way. The first NaN of a row is the greatest.
// in(row, column): where an element lies; finish(row, column) stores. red: 2 * ARK_WARPS words.
template <int COLUMNS, int V, bool WARP, class In, class Finish>
ARK_DEVICE void ark_greatest_of_rows(int rows, float* red, const In& in, const Finish& finish) {
  constexpr int WIDTH = (WARP ? ARK_LANES : ARK_THREADS) * V, U = 4, piece = U * WIDTH;
  const int me = (WARP ? ark_lane() : ark_tid()) * V, step = WARP ? ARK_WARPS : 1;
  decltype(ark_held<V>(in(0, 0))) ahead[U];
  const auto load = [&](int r, int begin) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int k = begin + u * WIDTH + me;
      if (k < COLUMNS) ark_hold(ahead[u], in(r, k));
    }
  };
  int r = WARP ? ark_warp() : 0;
  if (r < rows) load(r, 0);
  for (; r < rows; r += step) {
    float best = -ark_inf();
    ark_u32 at = me < COLUMNS ? static_cast<ark_u32>(me) : 0xffffffffu, odd = 0xffffffffu;
    for (int begin = 0; begin < COLUMNS; begin += piece) {
      decltype(ark_unpacked(ahead[0])) now[U];
#pragma unroll
      for (int u = 0; u < U; ++u) now[u] = ark_unpacked(ahead[u]);
      if (begin + piece < COLUMNS) {
        load(r, begin + piece);
      } else if (r + step < rows) {
        load(r + step, 0);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int k = begin + u * WIDTH + me;
        if (k >= COLUMNS) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float v = ark_get(now[u].v, j);
          at = v > best ? static_cast<ark_u32>(k + j) : at;
          best = v > best ? v : best;
          odd = v != v && odd == 0xffffffffu ? static_cast<ark_u32>(k + j) : odd;
        }
      }
    }
    ark_ranked(best, at, odd);
    if (WARP) {
      ark_warp_best(best, at);
    } else {
      ark_best(best, at, red);
    }
    if (me == 0) finish(r, at & ARK_PLACE);
  }
}

// coord: indices of dimensions 0 to 2; ROWS of dimension 2, which has LIMIT. input(row, column) and
// output(row) give the place of an element. The first of equal elements counts.
template <int ROWS, int LIMIT, int COLUMNS, typename T, int V, bool WARP, class I, class O>
ARK_DEVICE void ark_argmax(ArkCtx& c, const ArkTask& t, const I& input, const O& output,
                           ark_u64 address) {
  const int first = t.coord[2], rows = first + ROWS < LIMIT ? ROWS : LIMIT - first;
  const auto in = [&](int r, int k) { return input(first + r, k); };
  const auto store = [&](int r, ark_u32 at) { *output(first + r) = static_cast<T>(at); };
  if constexpr (ARK_THREADS > 1) {
    float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
    if (V == 1 || ark_aligned(address)) {
      ark_greatest_of_rows<COLUMNS, V, WARP>(rows, red, in, store);
    } else {
      ark_greatest_of_rows<COLUMNS, 1, WARP>(rows, red, in, store);
    }
    return;
  }
  for (int row = first; row < first + rows; ++row) {
    float best = -ark_inf();
    ark_u32 at = 0xffffffffu;
    for (int k = 0; k < COLUMNS; ++k) {
      const float v = ark_get(input(row, k), 0);
      if (ark_above(v, best) || at == 0xffffffffu) {
        best = v;
        at = static_cast<ark_u32>(k);
      }
    }
    *output(row) = static_cast<T>(at);
  }
}
