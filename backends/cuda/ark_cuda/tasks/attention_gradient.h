// The gradients of attention on mma.sync (FlashAttention-2, Dao 2023). A task has a tile of rows of
// one side, of keys and values or of queries and the result's gradients. A warp has 16 of these
// rows, and keeps their sums in registers. All warps walk over the rows of the other side, which
// are copied in blocks to a ring of slots in shared memory. attention_units.h describes the layout
// of rows in shared memory, ark/tasks/attention_gradient.py the task.

// The sizes of the data in shared memory, in bytes unless they are counts. D: elements of a head.
// KEYS: true if a tile has rows of keys. ROWS: rows of a tile. COLUMNS: rows of the other side in a
// block. PART: how many of them a warp multiplies at once. SLOTS: blocks that shared memory holds.
// HELD: true if a warp keeps its own rows in registers.
template <typename T, int D, bool KEYS_, int ROWS_, int COLUMNS_, int PART_, int SLOTS_, bool HELD_>
struct ArkGradientUnits {
  typedef T type;
  static constexpr bool KEYS = KEYS_, HELD = HELD_;
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_, PART = PART_, SLOTS = SLOTS_;
  static constexpr int STEPS = (D + 15) / 16, OWN = STEPS, SUMS = 8 * STEPS;
  static constexpr int PITCH = (STEPS + 3) / 4 * 128, OUT_PITCH = PITCH;
  static constexpr int SIDE = ROWS * PITCH, BLOCK = COLUMNS * PITCH;
  static constexpr int STATISTICS = KEYS ? 8 * COLUMNS : 0;  // of the block's queries
  static constexpr int SLOT = (2 * BLOCK + STATISTICS + 127) / 128 * 128;
  static_assert(ROWS == 16 * ARK_WARPS && COLUMNS % PART == 0 && PART % 16 == 0, "warps and rows");
  static_assert((ARK_RING_BYTES + ARK_LOOP_BYTES) % 128 == 0, "lines begin at multiples of 128");
};

template <int COUNT>
struct ArkGradientCount {  // a number of rows that is known to the compiler
  static constexpr int value = COUNT;
};

// The products of a warp's 16 rows, which begin at `own` in shared memory or are in `held`, with
// PART rows from `rows` on.
template <class U>
ARK_DEVICE void ark_gradient_scores(float (&s)[U::PART / 2], ark_u32 own, ark_u32 rows,
                                    const ark_u32 (&held)[U::HELD ? U::STEPS : 1][4]) {
  const typename U::type* type = nullptr;
#pragma unroll
  for (int i = 0; i < U::PART / 2; ++i) s[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < U::STEPS; ++k) {
    ark_u32 a[4];
    if constexpr (U::HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = held[k][i];
    } else {
      ark_load_tiles(a, ark_attention_step(own, k));
    }
#pragma unroll
    for (int j = 0; j < U::PART / 16; ++j) {
      ark_u32 b[4];
      ark_load_tiles(b, ark_attention_step(rows, k) + j * 16 * U::PITCH);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(s + 8 * j + 4 * n);
        ark_mma(d, a[0], a[1], a[2], a[3], b[2 * n], b[2 * n + 1], type);
      }
    }
  }
}

// Adds the products of a warp's 16 x PART factors with PART rows to the warp's sums.
template <class U>
ARK_DEVICE void ark_gradient_add(float (&sums)[U::SUMS], const ark_u32 (&p)[U::PART / 4],
                                 ark_u32 rows) {
  const typename U::type* type = nullptr;
#pragma unroll
  for (int k = 0; k < U::PART / 16; ++k) {
#pragma unroll
    for (int j = 0; j < U::STEPS; ++j) {
      ark_u32 b[4];
      ark_load_tiles_turned(b, ark_attention_step(rows, j) + k * 16 * U::PITCH);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(sums + 8 * j + 4 * n);
        ark_mma(d, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], b[2 * n], b[2 * n + 1],
                type);
      }
    }
  }
}

// The logarithms and slopes of the queries of a warp's scores. If the tile has rows of keys, they
// are loaded from shared memory when they are used; otherwise a lane keeps those of its two rows.
template <bool KEYS>
struct ArkGradientStatistics {
  float kept[KEYS ? 1 : 2][2];
  // which: 0 for the logarithm, 1 for the slope. i: the index of the score.
  template <class U>
  ARK_DEVICE_MEMBER float get(const char* block, int which, int part, int i) const {
    if constexpr (KEYS) {
      const int at = part + 8 * (i / 4) + ark_lane() % 4 * 2 + i % 2;
      return reinterpret_cast<const float*>(block + 2 * U::BLOCK)[which * U::COLUMNS + at];
    } else {
      return kept[which][i / 2 % 2];
    }
  }
};

// Turns a warp's scores into weights. own, column: the rows of the first score in the tile's side
// and in the other side. block: the slot that holds the other side's rows. part: the index in the
// block of the first of these rows.
template <class U, class S, class M>
ARK_DEVICE void ark_gradient_weigh(float (&s)[U::PART / 2], const M& mask, const ArkTask& t,
                                   float scale, int own, int column, const char* block, int part,
                                   const ArkGradientStatistics<U::KEYS>& statistics) {
  constexpr bool MASKED = M::given;
  constexpr int END = U::KEYS ? S::M : S::CONTEXT;
  const float factor = MASKED ? ARK_ATTENTION_LOG2E : scale * ARK_ATTENTION_LOG2E;
  if constexpr (MASKED) {
    const ArkAttentionTile tile{t.coord[0], t.coord[1], 0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < U::PART / 2; ++i) {
      const int row = own + ark_lane() / 4 + 8 * (i / 2 % 2);
      const int other = column + 8 * (i / 4) + ark_lane() % 4 * 2 + i % 2;
      s[i] = ark_attention_masked<S>(mask, tile, U::KEYS ? other : row, U::KEYS ? row : other,
                                     s[i] * scale);
    }
  }
#pragma unroll
  for (int i = 0; i < U::PART / 2; ++i) {
    const float top = statistics.template get<U>(block, 0, part, i) * ARK_ATTENTION_LOG2E;
    s[i] = ark_attention_power(fmaf(s[i], factor, -top));
  }
  const bool seen = !S::CAUSAL || (U::KEYS ? own + 15 <= column : column + U::PART - 1 <= own);
  if (seen && column + U::PART <= END) return;
#pragma unroll
  for (int i = 0; i < U::PART / 2; ++i) {
    const int row = own + ark_lane() / 4 + 8 * (i / 2 % 2);
    const int other = column + 8 * (i / 4) + ark_lane() % 4 * 2 + i % 2;
    const bool visible = !S::CAUSAL || (U::KEYS ? row <= other : other <= row);
    if (!visible || other >= END) s[i] = 0.0f;
  }
}

// Computes the first gradient of a tile (that of keys, or of queries) if FIRST, and the second one
// (that of values) if SECOND. The operands are functions that return the operand of a task.
template <class U, class S, bool FIRST, bool SECOND, class A, class B, class X, class Y, class L,
          class N, class M, class G, class H>
ARK_DEVICE void ark_gradient_pass(ArkCtx& c, const ArkTask& t, float scale, const A& tile_first,
                                  const B& tile_second, const X& other_first, const Y& other_second,
                                  const L& logarithms, const N& slopes, const M& mask,
                                  const G& to_first, const H& to_second) {
  typedef typename U::type T;
  constexpr int LENGTH = U::KEYS ? S::CONTEXT : S::M, END = U::KEYS ? S::M : S::CONTEXT;
  char* const shared = ARK_SCRATCH(c);
  const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
  const int begin = U::KEYS && S::CAUSAL ? t.coord[2] : 0;
  const int rows = t.coord[2] + U::ROWS < LENGTH ? U::ROWS : LENGTH - t.coord[2];
  const int reach = t.coord[2] + U::ROWS;
  const int end = !U::KEYS && S::CAUSAL && reach < END ? reach : END;
  const int own = 16 * static_cast<int>(ark_warp());
  const auto copy = [&](auto count, ark_u32 to, const auto& operand, int first, int many) {
    ark_attention_copy<U, S::D, decltype(count)::value, ARK_THREADS>(
        to, ark_tid(), 0, many, [&](int row) {
          return ark_address(operand, 0, t.coord[0], first + row, t.coord[1] * S::D);
        });
  };
  const auto fetch = [&](int n) {
    const int at = begin + n * U::COLUMNS;
    if (at < end) {
      const ark_u32 to = base + 2 * U::SIDE + n % U::SLOTS * U::SLOT;
      const ArkGradientCount<U::COLUMNS> count;
      copy(count, to, other_first(t), at, END - at);
      copy(count, to + U::BLOCK, other_second(t), at, END - at);
      if constexpr (U::KEYS) {
        for (int i = ark_tid(); i < 2 * U::COLUMNS; i += ARK_THREADS) {
          const int row = at + i % U::COLUMNS < END ? at + i % U::COLUMNS : END - 1;
          const auto operand = i < U::COLUMNS ? logarithms(t) : slopes(t);
          ark_copy_word(to + 2 * U::BLOCK + 4 * i,
                        ark_address(operand, 0, t.coord[0], row, t.coord[1]), true);
        }
      }
    }
    ark_copies_begun();
  };
  ark_sync();  // earlier data have left shared memory
  copy(ArkGradientCount<U::ROWS>(), base, tile_first(t), t.coord[2], rows);
  copy(ArkGradientCount<U::ROWS>(), base + U::SIDE, tile_second(t), t.coord[2], rows);
#pragma unroll
  for (int n = 0; n < U::SLOTS - 1; ++n) fetch(n);
  ArkGradientStatistics<U::KEYS> statistics;
  if constexpr (!U::KEYS) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = t.coord[2] + own + static_cast<int>(ark_lane()) / 4 + 8 * half;
      const int row = at < LENGTH ? at : LENGTH - 1;
      statistics.kept[0][half] = *ark_address(logarithms(t), 0, t.coord[0], row, t.coord[1]);
      statistics.kept[1][half] = *ark_address(slopes(t), 0, t.coord[0], row, t.coord[1]);
    }
  }
  float first[FIRST ? U::SUMS : 1], second[SECOND ? U::SUMS : 1];
#pragma unroll
  for (int i = 0; i < U::SUMS; ++i) {
    if constexpr (FIRST) first[i] = 0.0f;
    if constexpr (SECOND) second[i] = 0.0f;
  }
  const ark_u32 mine = base + own * U::PITCH + ark_attention_lane<U::PITCH, true>(ark_lane());
  ark_u32 held[2][U::HELD ? U::STEPS : 1][4];
  ark_copies_but<U::SLOTS - 2>();
  ark_sync();
  if constexpr (U::HELD) {
#pragma unroll
    for (int k = 0; k < U::STEPS; ++k) {
      ark_load_tiles(held[0][k], ark_attention_step(mine, k));
      if constexpr (FIRST) ark_load_tiles(held[1][k], ark_attention_step(mine + U::SIDE, k));
    }
  }
#pragma unroll 1
  for (int n = 0; begin + n * U::COLUMNS < end; ++n) {
    if (n > 0) {
      ark_copies_but<U::SLOTS - 2>();
      ark_sync();
    }
    fetch(n + U::SLOTS - 1);
    const int slot = 2 * U::SIDE + n % U::SLOTS * U::SLOT;
#pragma unroll 1
    for (int part = 0; part < U::COLUMNS; part += U::PART) {
      const int column = begin + n * U::COLUMNS + part, row = t.coord[2] + own;
      if (own >= rows || column >= end) break;
      if (S::CAUSAL && U::KEYS && row > column + U::PART - 1) continue;
      if (S::CAUSAL && !U::KEYS && column > row + 15) break;
      const ark_u32 at = base + slot + part * U::PITCH;
      const ark_u32 across = at + ark_attention_lane<U::PITCH, false>(ark_lane());
      const ark_u32 along = at + ark_attention_lane<U::PITCH, true>(ark_lane());
      float s[U::PART / 2];
      ark_u32 p[U::PART / 4];
      ark_gradient_scores<U>(s, mine, across, held[0]);
      ark_gradient_weigh<U, S>(s, mask(t), t, scale, row, column, shared + slot, part, statistics);
      if constexpr (SECOND) {
        ark_attention_round<T, U::PART>(s, p);
        ark_gradient_add<U>(second, p, along + U::BLOCK);
      }
      if constexpr (FIRST) {
        float d[U::PART / 2];
        ark_gradient_scores<U>(d, mine + U::SIDE, across + U::BLOCK, held[1]);
#pragma unroll
        for (int i = 0; i < U::PART / 2; ++i) {
          s[i] *= d[i] - statistics.template get<U>(shared + slot, 1, part, i);
        }
        ark_attention_round<T, U::PART>(s, p);
        ark_gradient_add<U>(first, p, along);
      }
    }
  }
  ark_copies_but<0>();
  ark_sync();
  if (own >= rows) return;
  const auto store = [&](const float (&sums)[U::SUMS], const auto& operand) {
    T* to = ark_address(operand, 0, t.coord[0], t.coord[2] + own, t.coord[1] * S::D);
    ark_attention_out<U, S::D>(shared + own * U::OUT_PITCH, sums, ark_lane(), 0, rows - own, to,
                               ark_at(operand, 0, 0, 1, 0));
  };
  if constexpr (FIRST) {
#pragma unroll
    for (int i = 0; i < U::SUMS; ++i) first[i] *= scale;
    store(first, to_first(t));
  }
  if constexpr (SECOND) store(second, to_second(t));
}

// Runs a task. JOINED: true if both gradients of a tile of keys are computed in one pass.
template <class U, class S, bool JOINED, class Q, class K, class V, class G, class L, class N,
          class M, class X, class Y>
ARK_DEVICE void ark_gradient_units(ArkCtx& c, const ArkTask& t, float scale, const Q& query,
                                   const K& keys, const V& values, const G& given,
                                   const L& logarithms, const N& slopes, const M& mask,
                                   const X& first, const Y& second) {
  if constexpr (!U::KEYS) {
    ark_gradient_pass<U, S, true, false>(c, t, scale, query, given, keys, values, logarithms,
                                         slopes, mask, first, second);
  } else if constexpr (JOINED) {
    ark_gradient_pass<U, S, true, true>(c, t, scale, keys, values, query, given, logarithms, slopes,
                                        mask, first, second);
  } else {
    ark_gradient_pass<U, S, true, false>(c, t, scale, keys, values, query, given, logarithms,
                                         slopes, mask, first, second);
    ark_gradient_pass<U, S, false, true>(c, t, scale, keys, values, query, given, logarithms,
                                         slopes, mask, first, second);
  }
}
