// The index of the largest element of each row. argmax.py describes operands and tasks.

// Finds the largest element of each row of COLUMNS elements, by a warp per row or by the block. A
// thread processes U packs of V neighbouring elements while it loads the next ones. The first NaN
// of a row counts as the largest. in(row, column): the address of an element of the input.
// finish(row, column): stores the result. red: 2 * ARK_WARPS words of shared memory.
template <int COLUMNS, int V, bool WARP, class In, class Finish>
ARK_DEVICE void ark_argmax_rows(int rows, float* red, const In& in, const Finish& finish) {
  constexpr int WIDTH = (WARP ? ARK_LANES : ARK_THREADS) * V, U = 4, piece = U * WIDTH;
  const int me = (WARP ? ark_lane() : ark_tid()) * V, step = WARP ? ARK_WARPS : 1;
  decltype(ark_held<V>(in(0, 0))) ahead[U] = {};
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

// Stores the index of the largest element of each row of a task. Task coordinates: indices of
// dimensions 0 to 2. The task has ROWS indices of dimension 2, whose size is LIMIT. input(row,
// column), output(row): addresses of an element and a result. Of equal elements, the first one
// counts.
template <int ROWS, int LIMIT, int COLUMNS, typename T, int V, bool WARP, class I, class O>
ARK_DEVICE void ark_argmax(ArkCtx& c, const ArkTask& t, const I& input, const O& output,
                           ark_u64 address) {
  const int first = t.coord[2], rows = first + ROWS < LIMIT ? ROWS : LIMIT - first;
  const auto in = [&](int r, int k) { return input(first + r, k); };
  const auto store = [&](int r, ark_u32 at) { *output(first + r) = static_cast<T>(at); };
  if constexpr (ARK_THREADS > 1) {
    float* red = reinterpret_cast<float*>(ARK_SCRATCH(c));
    if (V == 1 || ark_aligned(address)) {
      ark_argmax_rows<COLUMNS, V, WARP>(rows, red, in, store);
    } else {
      ark_argmax_rows<COLUMNS, 1, WARP>(rows, red, in, store);
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
