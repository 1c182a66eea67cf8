// Rotary embedding of a projection's columns. rotary.py describes operands and tasks.

// The destinations of the columns of a query-key-value projection. Queries are stored in the
// output. Keys and values are stored in the caches and, if the operand `fresh` is given, also in
// `fresh`, for tasks that read them in the same iteration. SEQUENCES: the number of rows if each
// row has its own position and its own heads of the caches, otherwise 1.
template <int HEADS, int KV_HEADS, int WIDTH, int LENGTH, int SEQUENCES, class O, class P, class F,
          class K, class V, class N>
struct ArkRope {
  static constexpr int D = WIDTH;                         // elements of a head
  static constexpr int CONTEXT = LENGTH;                  // positions in a cache
  static constexpr int QUERIES = HEADS * D;               // columns of queries
  static constexpr int ROTATED = (HEADS + KV_HEADS) * D;  // columns of queries and keys
  static constexpr int COLUMNS = ROTATED + KV_HEADS * D;  // all of them
  // The number of heads in the caches from the first head of one row to that of the next row.
  static constexpr int CACHED = SEQUENCES > 1 ? KV_HEADS : 0;
  O output;
  F frequencies;
  K keys;
  V values;
  N fresh;
  P positions;
  int position;  // of the first row
};

template <int HEADS, int KV_HEADS, int D, int CONTEXT, int SEQUENCES, class O, class P, class F,
          class K, class V, class N>
ARK_DEVICE ArkRope<HEADS, KV_HEADS, D, CONTEXT, SEQUENCES, O, P, F, K, V, N> ark_rope(
    O output, P position, F frequencies, K keys, V values, N fresh) {
  return {output, frequencies, keys, values, fresh, position, SEQUENCES > 1 ? 0 : position.p[0]};
}

// The position of row m of the projection in the row's sequence.
template <class R>
ARK_DEVICE int ark_rope_place(const R& rope, int m) {
  if constexpr (R::CACHED > 0) return rope.positions.p[m];
  return rope.position + m;
}

// The angle by which the pair that begins at this column of row m is rotated.
template <class R>
ARK_DEVICE float ark_rope_angle(const R& rope, int m, int column) {
  return static_cast<float>(ark_rope_place(rope, m)) * rope.frequencies.p[column % R::D / 2];
}

// Stores a pair of values (columns `column` and `column` + 1 of row m) in the output or a cache,
// depending on the column. Rows outside of the cache are not stored.
template <class R>
ARK_DEVICE void ark_rope_store(ArkCtx& c, const R& rope, int m, int column, float a, float b) {
  if (column < R::QUERIES) {
    ark_publish(c, rope.output, 0, 0, m, column, a);
    ark_publish(c, rope.output, 0, 0, m, column + 1, b);
    return;
  }
  const int place = ark_rope_place(rope, m);
  if (place < 0 || place >= R::CONTEXT) return;
  if constexpr (decltype(rope.fresh)::given) {
    ark_publish(c, rope.fresh, 0, 0, m, column - R::QUERIES, a);
    ark_publish(c, rope.fresh, 0, 0, m, column - R::QUERIES + 1, b);
  }
  const bool key = column < R::ROTATED;
  const int i = column - (key ? R::QUERIES : R::ROTATED);
  const int head = i / R::D + m * R::CACHED;
  auto* to = key ? ark_address(rope.keys, 0, head, place, i % R::D)
                 : ark_address(rope.values, 0, head, place, i % R::D);
  ark_put(to, 0, a);
  ark_put(to, 1, b);
}

// Rotates a pair of values (columns `column` and `column` + 1 of row m) if it belongs to a query or
// key, and stores it in the output or a cache.
template <class R>
ARK_DEVICE void ark_rope_pair(ArkCtx& c, const R& rope, int m, int column, float a, float b) {
  if (column < R::ROTATED) {
    float sine, cosine;
    ark_sincos(ark_rope_angle(rope, m, column), sine, cosine);
    ark_rotate(a, b, sine, cosine);
  }
  ark_rope_store(c, rope, m, column, a, b);
}

// Rotates queries and keys of a query-key-value projection x and stores all columns at their
// destinations (ark_rope_pair). Task coordinates: first column of x, and last column + 1. A task
// processes these columns of all ROWS rows.
template <int ROWS, class X, class R>
ARK_DEVICE void ark_rope_kv(ArkCtx& c, const ArkTask& t, X x, const R& rope) {
  constexpr int BATCH = ROWS > 1 && ARK_THREADS > 1 ? 8 : 1;  // pairs that are loaded together
  const int pairs = (t.coord[1] - t.coord[0]) / 2;
  for (int first = ark_tid(); first < pairs * ROWS; first += BATCH * ARK_THREADS) {
    float a[BATCH] = {}, b[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = first + i * ARK_THREADS;
      if (e >= pairs * ROWS) break;
      a[i] = ark_load(c, x, 0, 0, e / pairs, t.coord[0] + e % pairs * 2);
      b[i] = ark_load(c, x, 0, 0, e / pairs, t.coord[0] + e % pairs * 2 + 1);
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = first + i * ARK_THREADS;
      if (e >= pairs * ROWS) break;
      ark_rope_pair(c, rope, e / pairs, t.coord[0] + e % pairs * 2, a[i], b[i]);
    }
  }
}

template <typename T>
ARK_DEVICE void ark_rope_store_pack(T* to, const float (&v)[8]) {
  ArkPack<T, 8> made;
#pragma unroll
  for (int j = 0; j < 8; ++j) ark_put(made.v, j, v[j]);
  ark_store_pack<8>(to, made);
}
// Processes eight columns of row m from `column` on, which belong to one head: rotates them if the
// head is a query or key, and stores them as 16 bytes.
template <class R>
ARK_DEVICE void ark_rope_pack(const R& rope, int m, int column, float (&v)[8]) {
  static_assert(R::CACHED == 0, "rows of one sequence");
  const int place = rope.position + m, at = column % R::D;
  if (column < R::ROTATED) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      float sine, cosine;
      ark_sincos(ark_rope_angle(rope, m, column + j), sine, cosine);
      ark_rotate(v[j], v[j + 1], sine, cosine);
    }
  }
  if (column < R::QUERIES) {
    ark_rope_store_pack(ark_address(rope.output, 0, 0, m, column), v);
  } else if (place >= 0 && place < R::CONTEXT) {
    const bool key = column < R::ROTATED;
    const int head = (column - (key ? R::QUERIES : R::ROTATED)) / R::D;
    auto* to = key ? ark_address(rope.keys, 0, head, place, at)
                   : ark_address(rope.values, 0, head, place, at);
    ark_rope_store_pack(to, v);
  }
}
// Like ark_rope_kv, for a projection in plain memory, which is read eight columns at a time.
template <int ROWS, class X, class R>
ARK_DEVICE void ark_rope_kv_packs(ArkCtx&, const ArkTask& t, X x, const R& rope) {
  constexpr int BATCH = 3;  // packs that are loaded together
  const int packs = (t.coord[1] - t.coord[0]) / 8;
  for (int first = ark_tid(); first < packs * ROWS; first += BATCH * ARK_THREADS) {
    decltype(ark_load_pack<8>(x.p)) asked[BATCH] = {};
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = first + i * ARK_THREADS;
      if (e >= packs * ROWS) break;
      asked[i] = ark_load_pack<8>(ark_address(x, 0, 0, e / packs, t.coord[0] + e % packs * 8));
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      const int e = first + i * ARK_THREADS;
      if (e >= packs * ROWS) break;
      float v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = ark_get(asked[i].v, j);
      ark_rope_pack(rope, e / packs, t.coord[0] + e % packs * 8, v);
    }
  }
}

// Like ark_rope_kv, but each head of queries and keys is first divided by its root mean square and
// multiplied by a norm's weights: `norms` has those of queries, then those of keys. A task
// processes whole heads, each by one warp.
template <int ROWS, class X, class R, class N>
ARK_DEVICE void ark_rope_kv_normed(ArkCtx& c, const ArkTask& t, X x, const R& rope, N norms,
                                   float eps) {
  constexpr int PAIRS = (R::D / 2 + ARK_LANES - 1) / ARK_LANES;
  const int heads = (t.coord[1] - t.coord[0]) / R::D;
  for (int e = ark_warp(); e < heads * ROWS; e += ARK_WARPS) {
    const int m = e / heads, first = t.coord[0] + e % heads * R::D;
    const bool rotated = first < R::ROTATED;
    const auto place = [&](int i) { return 2 * (i * ARK_LANES + ark_lane()); };
    // What does not depend on x is computed first, because x may still be awaited.
    float sine[PAIRS] = {}, cosine[PAIRS] = {}, factor[2 * PAIRS] = {};
    for (int i = 0; i < PAIRS; ++i) {
      if (!rotated || place(i) >= R::D) continue;
      const int at = (first < R::QUERIES ? 0 : R::D) + place(i);
      ark_sincos(ark_rope_angle(rope, m, first + place(i)), sine[i], cosine[i]);
      factor[2 * i] = ark_get(norms.p, at);
      factor[2 * i + 1] = ark_get(norms.p, at + 1);
    }
    float a[PAIRS] = {}, b[PAIRS] = {}, square = 0.0f;
    for (int i = 0; i < PAIRS; ++i) {
      if (place(i) >= R::D) continue;
      a[i] = ark_load(c, x, 0, 0, m, first + place(i));
      b[i] = ark_load(c, x, 0, 0, m, first + place(i) + 1);
      square += a[i] * a[i] + b[i] * b[i];
    }
    const float scale = ark_rsqrt(ark_warp_sum(square) / R::D + eps);
    for (int i = 0; i < PAIRS; ++i) {
      if (place(i) >= R::D) continue;
      if (rotated) {
        a[i] *= scale * factor[2 * i];
        b[i] *= scale * factor[2 * i + 1];
        ark_rotate(a[i], b[i], sine[i], cosine[i]);
      }
      ark_rope_store(c, rope, m, first + place(i), a[i], b[i]);
    }
  }
}

// Rotates heads of a row. Task coordinates: row, first head, and last head + 1. Pairs are
// neighbours (INTERLEAVED), or corresponding elements of the halves of a head.
template <int D, bool INTERLEAVED, class X, class O, class P, class F>
ARK_DEVICE void ark_rotary_embedding(ArkCtx& c, const ArkTask& t, X x, O output, P position,
                                     F frequencies) {
  const int row = t.coord[0], pairs = (t.coord[2] - t.coord[1]) * (D / 2);
  for (int e = ark_tid(); e < pairs; e += ARK_THREADS) {
    const int i = e % (D / 2), head = t.coord[1] + e / (D / 2);
    const int first = head * D + (INTERLEAVED ? 2 * i : i);
    const int second = first + (INTERLEAVED ? 1 : D / 2);
    float a = ark_load(c, x, 0, 0, row, first);
    float b = ark_load(c, x, 0, 0, row, second);
    const float angle = static_cast<float>(position.p[0] + row) * frequencies.p[i];
    ark_rotate(a, b, ark_sin(angle), ark_cos(angle));
    ark_publish(c, output, 0, 0, row, first, a);
    ark_publish(c, output, 0, 0, row, second, b);
  }
}
