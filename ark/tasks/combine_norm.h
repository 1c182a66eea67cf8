// Adds up the shares (partial results of ranks) of each row, and normalises the rows by their root
// mean square.

// Converts the values of a 16-byte chunk to the floats that are normalised. The values have been
// rounded to the type in which they are stored.
template <typename T, int MANY>
ARK_DEVICE void ark_chunk_terms(const ArkChunk<T>& from, float (&to)[MANY]) {
#pragma unroll
  for (int e = 0; e < MANY; ++e) to[e] = ark_term(from.v[e]);
}

template <typename O, typename W, int MANY>
ARK_DEVICE void ark_store_normed(O* to, const W* weight, const float (&v)[MANY], float factor,
                                 bool aligned) {
  constexpr int ROOM = static_cast<int>(16 / sizeof(O)), V = MANY < ROOM ? MANY : ROOM;
#pragma unroll
  for (int part = 0; part < MANY; part += V) {
    ArkPack<O, V> made;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      ark_put(made.v, j, v[part + j] * factor * ark_get(weight, part + j));
    }
    if (aligned) {
      ark_store_pack<V>(to + part, made);
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) to[part + j] = made.v[j];
    }
  }
}

// Adds the ranks' shares of each row of a task, stores the sum and its rmsnorm. A thread loads B
// chunks of 16 bytes of each share at a time. HELD: the number of chunks of the sum that a thread
// keeps in registers until the row's norm is known; if it is 0, the sum is read again from memory.
template <typename T, int K, int HELD, int B, typename HOW, typename O, typename W,
          typename... Shares>
ARK_DEVICE void ark_combine_norm_rows(ArkCtx& c, const ArkTask& t, HOW how, bool aligned, T* sum,
                                      O* normed, const W* weight, float eps, Shares... shares) {
  constexpr int MANY = static_cast<int>(16 / sizeof(T)), CHUNKS = K / MANY;
  constexpr int SHARES = static_cast<int>(sizeof...(Shares));
  constexpr int EACH = HELD > 0 ? HELD : (CHUNKS + ARK_THREADS - 1) / ARK_THREADS;
  float* folds = reinterpret_cast<float*>(ARK_SCRATCH(c));
  const ark_i64 bytes = static_cast<ark_i64>(t.coord[1]) * static_cast<ark_i64>(sizeof(T));
  int parity = 0;
  for (int row = t.coord[0] / K; row < t.coord[1] / K; ++row) {
    const ark_i64 first = static_cast<ark_i64>(row) * CHUNKS;
    float kept[HELD > 0 ? HELD : 1][MANY] = {}, total[1] = {0.0f};
#pragma unroll(HELD > 0 ? HELD : 1)
    for (int e = 0; e < EACH; e += B) {
      ArkChunk<T> v[SHARES][B] = {};
      const ArkChunks at{first + e * ARK_THREADS + ark_tid(), first + CHUNKS, bytes};
      ark_load_shares<false, 0, B, T>(c, how, at, v, shares...);
      ark_load_shares<true, 0, B, T>(c, how, at, v, shares...);
#pragma unroll
      for (int b = 0; b < B; ++b) {
        const ark_i64 chunk = ark_chunk(at, b);
        if (chunk >= at.end) continue;
#pragma unroll
        for (int i = 0; i < MANY; ++i) {
          float joined = ark_term(v[0][b].v[i]);
#pragma unroll
          for (int s = 1; s < SHARES; ++s) joined = ark_plus(joined, ark_term(v[s][b].v[i]));
          ark_store_term(v[0][b].v[i], joined);
        }
        ark_store_chunk(c, how, sum, chunk, at, false, v[0][b]);
        float (&mine)[MANY] = kept[HELD > 0 ? e + b : 0];
        ark_chunk_terms(v[0][b], mine);
#pragma unroll
        for (int i = 0; i < MANY; ++i) total[0] += mine[i] * mine[i];
      }
    }
    ark_fold<ArkAddFold, ARK_WARPS>(total, folds, parity);
    const float factor = ark_rsqrt(total[0] / static_cast<float>(K) + eps);
#pragma unroll(HELD > 0 ? HELD : 1)
    for (int e = 0; e < EACH; ++e) {
      const int chunk = e * ARK_THREADS + ark_tid();
      if (chunk >= CHUNKS) continue;
      const ark_i64 place = (first + chunk) * MANY;
      if (HELD == 0) {
#pragma unroll
        for (int i = 0; i < MANY; ++i) kept[0][i] = ark_term(sum[place + i]);
      }
      ark_store_normed(normed + place, weight + chunk * MANY, kept[HELD > 0 ? e : 0], factor,
                       aligned);
    }
  }
}

template <typename T, int K, int HELD, typename O, typename W, typename... Shares>
ARK_DEVICE void ark_combine_norm(ArkCtx& c, const ArkTask& t, bool aligned, T* sum, O* normed,
                                 const W* weight, float eps, Shares... shares) {
  constexpr int SHARES = static_cast<int>(sizeof...(Shares));
  constexpr int B = HELD > 0 && SHARES * HELD <= 8 ? HELD : 1;
  if (aligned) {
    ark_combine_norm_rows<T, K, HELD, B>(c, t, ArkWhole(), true, sum, normed, weight, eps,
                                         shares...);
  } else {
    ark_combine_norm_rows<T, K, 0, 1>(c, t, ArkPiecemeal(), false, sum, normed, weight, eps,
                                      shares...);
  }
}

// Like ark_combine_norm_rows, for shares in plain memory at multiples of 16 bytes: processes ROWS
// rows from `row` on. A thread loads its HELD chunks of all these rows before it adds them.
template <int ROWS, int HELD, typename T, int K, int SHARES, typename O, typename W>
ARK_DEVICE void ark_combine_norm_row_group(int row, const T* const (&from)[SHARES], T* sum,
                                           O* normed, const W* weight, float eps, float* folds,
                                           int& parity) {
  constexpr int MANY = static_cast<int>(16 / sizeof(T)), CHUNKS = K / MANY;
  const auto there = [](int h) {
    return CHUNKS % ARK_THREADS == 0 || h * ARK_THREADS + ark_tid() < CHUNKS;
  };
  const auto place = [&](int r, int h) {
    return (static_cast<ark_i64>(row + r) * CHUNKS + h * ARK_THREADS + ark_tid()) * MANY;
  };
  // The arrays are initialised with zeros. Otherwise the compiler may assume that they are read
  // before they are written. It would then keep their registers live in all other task bodies of
  // the loop kernel.
  ArkPack<T, MANY> v[ROWS][HELD][SHARES] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      if (!there(h)) continue;
#pragma unroll
      for (int s = 0; s < SHARES; ++s) v[r][h][s] = ark_load_pack<MANY>(from[s] + place(r, h));
    }
  }
  // The weight is loaded as words, without waiting for them before they are multiplied. It is
  // loaded after the rows: a compiler would move loads that are equal for all rows out of the loop,
  // convert them element by element, and wait for them there.
  decltype(ark_held<MANY>(weight)) scale[HELD] = {};
#pragma unroll
  for (int h = 0; h < HELD; ++h) {
    if (there(h)) ark_hold(scale[h], weight + (h * ARK_THREADS + ark_tid()) * MANY);
  }
  // This barrier keeps all loads in flight. Without it, a compiler that saves registers would add
  // the shares that have arrived before it issues the remaining loads.
  ark_sync();
  float kept[ROWS][HELD][MANY] = {}, total[ROWS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      if (!there(h)) continue;
      ArkPack<T, MANY> made = {};
#pragma unroll
      for (int i = 0; i < MANY; ++i) {
        float joined = ark_get(v[r][h][0].v, i);
#pragma unroll
        for (int s = 1; s < SHARES; ++s) joined += ark_get(v[r][h][s].v, i);
        ark_put(made.v, i, joined);
        kept[r][h][i] = ark_get(made.v, i);
        total[r] += kept[r][h][i] * kept[r][h][i];
      }
      ark_store_pack<MANY>(sum + place(r, h), made);
    }
  }
  ark_fold<ArkAddFold, ARK_WARPS>(total, folds, parity);
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const float factor = ark_rsqrt(total[r] / static_cast<float>(K) + eps);
#pragma unroll
    for (int h = 0; h < HELD; ++h) {
      if (!there(h)) continue;
      ark_store_normed(normed + place(r, h), ark_unpacked(scale[h]).v, kept[r][h], factor, true);
    }
  }
}

// Processes all rows of a task, ROWS at a time. The last rows are processed one at a time.
template <typename T, int K, int HELD, int ROWS, typename O, typename W, typename... Shares>
ARK_DEVICE void ark_combine_norm_plain(ArkCtx& c, const ArkTask& t, T* sum, O* normed,
                                       const W* weight, float eps, Shares... shares) {
  constexpr int SHARES = static_cast<int>(sizeof...(Shares));
  const T* const from[SHARES] = {shares.p...};
  float* folds = reinterpret_cast<float*>(ARK_SCRATCH(c));
  int row = t.coord[0] / K, parity = 0;
  const int end = t.coord[1] / K;
  for (; row + ROWS <= end; row += ROWS) {
    ark_combine_norm_row_group<ROWS, HELD, T, K>(row, from, sum, normed, weight, eps, folds,
                                                 parity);
  }
  if constexpr (ROWS > 1) {
    // The remaining rows use another part of shared memory, because slower warps may still read the
    // sums of the preceding rows.
    folds += 2 * ROWS * ARK_WARPS;
    for (parity = 0; row < end; ++row) {
      ark_combine_norm_row_group<1, HELD, T, K>(row, from, sum, normed, weight, eps, folds, parity);
    }
  }
}
