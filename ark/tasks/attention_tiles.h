// Attention of tiles of queries with a running softmax (FlashAttention). attention_tiles.py
// describes operands and tasks.

// The compile-time constants of an attention: parameters and sizes of attention_tiles.py. WIDTH:
// elements of a head. LENGTH: rows of queries in a sequence. TILE: rows of queries in a tile.
// GROUP: heads in a section (see ark_attention_numbered).
template <int BATCH, int HEADS, int KV_HEADS, int WIDTH, int LENGTH, int CONTEXT_, int TILE,
          bool CAUSAL_, int WINDOW_, bool CAPPED_, bool BY_ROWS_, int TASKS_, int GROUP,
          bool STRICT_ = false>
struct ArkAttentionShape {
  static constexpr int D = WIDTH, ROWS = TILE, M = LENGTH, CONTEXT = CONTEXT_, WINDOW = WINDOW_;
  static constexpr int PER_KV = HEADS / KV_HEADS, TASKS = TASKS_,
                       BLOCKS = (LENGTH + TILE - 1) / TILE;
  static constexpr int HEADS_OF = HEADS, ALL = BATCH * HEADS, SECTION = GROUP;
  static constexpr bool CAUSAL = CAUSAL_, CAPPED = CAPPED_, BY_ROWS = BY_ROWS_, STRICT = STRICT_;
};

// A tile of queries. batch, head, row: its first query. place: the position of that query in the
// sequence. begin, end: the range of keys that at least one query of the tile can see.
struct ArkAttentionTile {
  int batch, head, row, place, begin, end;
};

// A smaller tile: `rows` queries of the given tile, beginning `at` rows after its first row.
template <class S>
ARK_DEVICE ArkAttentionTile ark_attention_part(const ArkAttentionTile& of, int at, int rows) {
  ArkAttentionTile tile{of.batch, of.head, of.row + at, of.place + at, 0, S::CONTEXT};
  if (S::CAUSAL && tile.place + rows < S::CONTEXT) tile.end = tile.place + rows;
  if (S::WINDOW > 0 && tile.place - S::WINDOW >= 0) tile.begin = tile.place - S::WINDOW + 1;
  if (tile.end < 0) tile.end = 0;
  if (tile.begin > tile.end) tile.begin = tile.end;
  return tile;
}
template <class S>
ARK_DEVICE ArkAttentionTile ark_attention_tile(int batch, int head, int row, int position) {
  const int rows = row + S::ROWS < S::M ? S::ROWS : S::M - row;
  return ark_attention_part<S>({batch, head, row, position + row, 0, 0}, 0, rows);
}

// The tile with a given number. The heads of all batches are divided into sections of consecutive
// heads. The tiles of a section are numbered so that the head varies fastest, then the rows. The
// rows are in rising order in every second section and in falling order in the others.
template <class S>
ARK_DEVICE ArkAttentionTile ark_attention_numbered(int number, int position) {
  constexpr int SECTIONS = (S::ALL + S::SECTION - 1) / S::SECTION;
  const int section = number / (S::SECTION * S::BLOCKS), begin = section * S::SECTION;
  const int within = number % (S::SECTION * S::BLOCKS);
  const int high = begin + S::SECTION < S::ALL ? S::SECTION : S::ALL - begin;
  const int head = begin + within % high, block = within / high;
  const bool falling = (SECTIONS - 1 - section) % 2 == 0;
  const int row = (falling ? S::BLOCKS - 1 - block : block) * S::ROWS;
  return ark_attention_tile<S>(head / S::HEADS_OF, head % S::HEADS_OF, row, position);
}

// The position of the first query row, read from the operand `position`. If it is outside of the
// cache, it is replaced by a position at which rows see no keys or all keys, so that no access is
// out of bounds.
template <class S, class P>
ARK_DEVICE int ark_attention_place(P position) {
  if constexpr (P::given) {
    const int at = position.p[0];
    return at < -S::M ? -S::M : at < S::CONTEXT ? at : S::CONTEXT;
  }
  return 0;
}

// Calls work(tile) for each tile of queries that the task has.
template <class S, class P, class Work>
ARK_DEVICE void ark_attention_each(const ArkTask& t, P position, const Work& work) {
  const int place = ark_attention_place<S>(position);
  if constexpr (S::TASKS == 0) {
    work(ark_attention_tile<S>(t.coord[0], t.coord[1], t.coord[2], place));
  } else {
    bool back = false;
    for (int first = 0; first < S::ALL * S::BLOCKS; first += S::TASKS, back = !back) {
      const int number = first + (back ? S::TASKS - 1 - t.coord[0] : t.coord[0]);
      if (number < S::ALL * S::BLOCKS) work(ark_attention_numbered<S>(number, place));
    }
  }
}

// The address of a key or value of a head. For keys in pages, `key` is the position in the
// sequence.
template <class S, class K>
ARK_DEVICE auto ark_attention_row(K keys, int batch, int kv, int key) {
  if constexpr (S::BY_ROWS) {
    return ark_address(keys, 0, batch, key, kv * S::D);
  } else {
    return ark_address(keys, batch, kv, key, 0);
  }
}

// The range of keys, first to end - 1, that the query row at position `place` may attend to.
template <class S>
ARK_DEVICE int ark_attention_first(int place) {
  return S::WINDOW > 0 && place - S::WINDOW >= 0 ? place - S::WINDOW + 1 : 0;
}
template <class S>
ARK_DEVICE int ark_attention_end(int place) {
  return S::CAUSAL && place + 1 < S::CONTEXT ? place + 1 : S::CONTEXT;
}

// The meanings of the operand `mask` (batch, heads, rows, keys). SEEN: true for visible keys.
// HIDDEN: true for hidden keys, whose score becomes `fill`. ADDED: numbers that are added to the
// scores. BATCHES: the number of batches after which the masks repeat; 0 if they do not.
enum { ARK_MASK_SEEN, ARK_MASK_HIDDEN, ARK_MASK_ADDED };
constexpr float ARK_ATTENTION_LEAST = -1e28f;  // lower finite scores are replaced by this
template <int FORM_, int BATCHES_, class X>
struct ArkAttentionMask {
  static constexpr bool given = true;
  static constexpr int FORM = FORM_, BATCHES = BATCHES_;
  X operand;
  float fill;
};
template <int FORM, int BATCHES = 0, class X>
ARK_DEVICE ArkAttentionMask<FORM, BATCHES, X> ark_attention_mask_of(X operand, float fill) {
  return {operand, fill};
}

// A score after the mask is applied. Rows and keys after the last one use the last one's mask.
template <class S, class M>
ARK_DEVICE float ark_attention_masked(const M& mask, const ArkAttentionTile& tile, int row, int key,
                                      float score) {
  if constexpr (M::given) {
    row = tile.row + row < S::M ? tile.row + row : S::M - 1;
    key = key < S::CONTEXT ? key : S::CONTEXT - 1;
    int batch = tile.batch;
    if constexpr (M::BATCHES > 0) batch %= M::BATCHES;
    const auto* at = ark_address(mask.operand, batch, tile.head, row, key);
    if constexpr (M::FORM == ARK_MASK_ADDED) {
      const float v = ark_get(at, 0);
      score += v < ARK_ATTENTION_LEAST && v > -ark_inf() ? ARK_ATTENTION_LEAST : v;
    } else if (*at == (M::FORM == ARK_MASK_HIDDEN)) {
      score = mask.fill;
    }
  }
  return score;
}

// The factor that normalises a row's weighted sum of values. weight: the sum of the row's
// exponentials.
template <class S>
ARK_DEVICE float ark_attention_share(float weight) {
  return S::STRICT || weight != 0.0f ? 1.0f / weight : 0.0f;
}

// The logarithm of a row's sum of exponentials, from which weights are computed again:
// exp(score - logarithm). top: what the exponentials are relative to. A row that sees no key has
// the weights 0, or NaN if STRICT.
template <class S>
ARK_DEVICE float ark_attention_logarithm(float top, float weight) {
  if (weight == 0.0f) return S::STRICT ? ark_inf() - ark_inf() : ark_inf();
  return top + ark_log(weight);
}

// The shared memory of the device function that every backend can use: R rows of queries, their
// scores of C keys, and their sums. If a block has one thread, it also has C keys, transposed.
template <class S, int C, int R>
struct ArkAttentionTileScratch {
  float query[R * S::D];
  float sum[R * S::D];
  float score[R * C];
  float top[R], weight[R], keep[R];
  float keys[ARK_THREADS == 1 ? C * S::D : 1];
};

// Computes the scores of `many` keys from `first` on. The score of a key that a row does not see is
// -inf.
template <class S, int C, int R, class K, class M>
ARK_DEVICE void ark_attention_tile_scores(ArkAttentionTileScratch<S, C, R>& s, K keys,
                                          const M& mask, const ArkAttentionTile& tile, float cap,
                                          int rows, int first, int many) {
  const int kv = tile.head / S::PER_KV;
  const auto finish = [&](int r, int e, float v) {
    const int key = first + e, place = tile.place + r;
    const bool seen =
        e < many && key >= ark_attention_first<S>(place) && key < ark_attention_end<S>(place);
    if (S::CAPPED) v = cap * ark_tanh(v / cap);
    return seen ? ark_attention_masked<S>(mask, tile, r, key, v) : -ark_inf();
  };
  if constexpr (ARK_THREADS == 1) {
    for (int e = 0; e < C; ++e) {
      const auto* row = ark_attention_row<S>(keys, tile.batch, kv, e < many ? first + e : first);
      for (int d = 0; d < S::D; ++d) s.keys[d * C + e] = ark_get(row, d);
    }
    for (int r = 0; r < rows; ++r) {
      float sums[C];
      for (int e = 0; e < C; ++e) sums[e] = 0.0f;
      for (int d = 0; d < S::D; ++d) {
        const float q = s.query[r * S::D + d];
        for (int e = 0; e < C; ++e) sums[e] += q * s.keys[d * C + e];
      }
      for (int e = 0; e < C; ++e) s.score[r * C + e] = finish(r, e, sums[e]);
    }
  } else {
    for (int i = ark_tid(); i < rows * C; i += ARK_THREADS) {
      const int r = i / C, e = i % C;
      float v = 0.0f;
      if (e < many) {
        const auto* row = ark_attention_row<S>(keys, tile.batch, kv, first + e);
        for (int d = 0; d < S::D; ++d) v += s.query[r * S::D + d] * ark_get(row, d);
      }
      s.score[i] = finish(r, e, v);
    }
  }
}

// Softmax of a block of keys: replaces the scores by exponentials relative to the running maximum.
template <class S, int C, int R>
ARK_DEVICE void ark_attention_tile_softmax(ArkAttentionTileScratch<S, C, R>& s, int rows) {
  for (int r = ark_warp(); r < rows; r += ARK_WARPS) {
    float m = s.top[r];
    for (int e = ark_lane(); e < C; e += ARK_LANES) {
      const float v = s.score[r * C + e];
      m = v > m ? v : m;
    }
    m = ark_warp_max(m);
    float sum = 0.0f;
    for (int e = ark_lane(); e < C; e += ARK_LANES) {
      const float v = ark_exp(s.score[r * C + e] - m);
      s.score[r * C + e] = v;
      sum += v;
    }
    sum = ark_warp_sum(sum);
    if (ark_lane() == 0) {
      s.keep[r] = ark_exp(s.top[r] - m);
      s.weight[r] = s.weight[r] * s.keep[r] + sum;
      s.top[r] = m;
    }
  }
}

template <class S, int C, int R, class V>
ARK_DEVICE void ark_attention_tile_values(ArkAttentionTileScratch<S, C, R>& s, V values,
                                          const ArkAttentionTile& tile, int rows, int first,
                                          int many) {
  const int kv = tile.head / S::PER_KV;
  if constexpr (ARK_THREADS == 1) {
    for (int e = 0; e < many; ++e) {  // the block's values as floats, in the memory of the keys
      const auto* row = ark_attention_row<S>(values, tile.batch, kv, first + e);
      for (int d = 0; d < S::D; ++d) s.keys[e * S::D + d] = ark_get(row, d);
    }
    for (int r = 0; r < rows; ++r) {
      float* sum = s.sum + r * S::D;
      for (int d = 0; d < S::D; ++d) sum[d] *= s.keep[r];
      for (int e = 0; e < many; ++e) {
        const float p = s.score[r * C + e];
        if (p == 0.0f) continue;
        for (int d = 0; d < S::D; ++d) sum[d] += p * s.keys[e * S::D + d];
      }
    }
  } else {
    for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
      const int r = i / S::D, d = i % S::D;
      float sum = s.sum[i] * s.keep[r];
      for (int e = 0; e < many; ++e) {
        const float p = s.score[r * C + e];
        if (p != 0.0f)
          sum += p * ark_get(ark_attention_row<S>(values, tile.batch, kv, first + e), d);
      }
      s.sum[i] = sum;
    }
  }
}

// Computes the attention of all tiles of a task, R rows by C keys at a time. cap: the soft cap of
// the scores. sinks: further scores of the heads. logarithms: the operand to which the logarithm of
// each row's sum of exponentials is stored. Operands that are not given have the type ArkNoOperand.
template <class S, int C, int R, class Q, class K, class V, class O, class P, class N, class M,
          class L = ArkNoOperand>
ARK_DEVICE void ark_attention_tiles(ArkCtx& c, const ArkTask& t, float scale, float cap, Q query,
                                    K keys, V values, O output, P position, N sinks, M mask,
                                    L logarithms = {}) {
  auto& s = *reinterpret_cast<ArkAttentionTileScratch<S, C, R>*>(ARK_SCRATCH(c));
  ark_attention_each<S>(t, position, [&](const ArkAttentionTile& whole) {
    ark_check_pages<S::CONTEXT>(c, keys, position, whole.begin, whole.end);
    const int left = whole.row + S::ROWS < S::M ? S::ROWS : S::M - whole.row;
    for (int strip = 0; strip < left; strip += R) {
      const int rows = strip + R < left ? R : left - strip;
      const ArkAttentionTile tile = ark_attention_part<S>(whole, strip, rows);
      for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
        const int column = tile.head * S::D + i % S::D;
        s.query[i] = ark_load(c, query, 0, tile.batch, tile.row + i / S::D, column) * scale;
        s.sum[i] = 0.0f;
      }
      for (int r = ark_tid(); r < rows; r += ARK_THREADS) {
        s.top[r] = -1e30f;
        s.weight[r] = 0.0f;
        if constexpr (N::given) {
          s.top[r] = sinks.p[tile.head];
          s.weight[r] = 1.0f;
        }
      }
      ark_sync();
      for (int first = tile.begin; first < tile.end; first += C) {
        const int many = tile.end - first < C ? tile.end - first : C;
        ark_attention_tile_scores<S, C, R>(s, keys, mask, tile, cap, rows, first, many);
        ark_sync();
        ark_attention_tile_softmax<S, C, R>(s, rows);
        ark_sync();
        ark_attention_tile_values<S, C, R>(s, values, tile, rows, first, many);
        ark_sync();
      }
      for (int i = ark_tid(); i < rows * S::D; i += ARK_THREADS) {
        const float weight = s.weight[i / S::D];
        const int column = tile.head * S::D + i % S::D;
        ark_publish(c, output, 0, tile.batch, tile.row + i / S::D, column,
                    S::STRICT || weight != 0.0f ? s.sum[i] / weight : 0.0f);
      }
      if constexpr (L::given) {
        for (int r = ark_tid(); r < rows; r += ARK_THREADS) {
          ark_publish(c, logarithms, 0, tile.batch, tile.row + r, tile.head,
                      ark_attention_logarithm<S>(s.top[r], s.weight[r]));
        }
      }
      ark_sync();
    }
  });
}
