// Attention of tiles of queries on mma.sync (FlashAttention-2, Dao 2023). A slab, 16 rows of
// queries, is a warp's, or a team's of several warps, whose scores and sums stay in registers. The
// slabs' warps are a group; where a tile has fewer warps than the block, several groups take every
// so manieth block of keys, each at its own pace, and are joined in the end. A group copies its
// blocks of keys and values to shared memory in turn, into slots that it goes round. What a task
// computes is said in ark/tasks/attention_tiles.py.

// Sizes, in bytes of shared memory where they are no numbers. D: elements of a head. In shared
// memory a row has whole lines of 128 bytes, in which pieces of 16 change places with the row, so
// that no eight rows' pieces meet in a bank. HELD: queries stay in registers.
template <typename T, int D, int SLABS_, int TEAM_, int GROUPS_, int KEYS_, int SLOTS_, bool HELD_>
struct ArkAttentionUnits {
  typedef T type;
  static constexpr int SLABS = SLABS_, TEAM = TEAM_, GROUPS = GROUPS_, KEYS = KEYS_, SLOTS = SLOTS_;
  static constexpr bool HELD = HELD_;
  static constexpr int ROWS = 16 * SLABS, WARPS = SLABS * TEAM, THREADS = 32 * WARPS;  // of a group
  static constexpr int STEPS = (D + 15) / 16;            // 16 columns of a head
  static constexpr int OWN = (STEPS + TEAM - 1) / TEAM;  // of the result's those that a warp has
  static constexpr int SCORES = KEYS / TEAM;             // of a block's keys those of a warp
  static constexpr int PITCH = (STEPS + 3) / 4 * 128;
  static constexpr int SLOT = KEYS * PITCH, RING = ROWS * PITCH;  // slots begin behind the queries
  static constexpr int SHARED = RING + GROUPS * SLOTS * SLOT;  // and behind them what teams share
  static constexpr int TEAM_BYTES = KEYS * 32 + TEAM * 64;
  static constexpr int SUMS = OWN * 1024, OUT_PITCH = (OWN + 3) / 4 * 128;
  // What a warp hands over in the end: its sums and statistics, or results on their way out.
  static constexpr int PART = SUMS + 512 > 16 * OUT_PITCH ? SUMS + 512 : 16 * OUT_PITCH;
  // Behind all that: the tile's place.
  static constexpr int WALK = SHARED + (TEAM > 1 ? GROUPS * SLABS * TEAM_BYTES : 0);
  static constexpr int JOIN = (GROUPS > 1 ? GROUPS / 2 : 1) * WARPS * PART;
  static constexpr int STRIP = WALK > JOIN ? WALK : JOIN;
  static_assert(GROUPS * WARPS <= ARK_WARPS && SCORES % 16 == 0, "warps and keys");
  static_assert(2 + GROUPS * (TEAM > 1 ? 1 + SLABS : 1) <= 16, "a block has 16 barriers");
  static_assert((ARK_RING_BYTES + ARK_LOOP_BYTES) % 128 == 0, "lines begin at multiples of 128");
};

// Barriers from 2 on, of COUNT threads.
template <int COUNT>
ARK_DEVICE void ark_attention_meet(int barrier) {
  __syncwarp();
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

// What a block computes at once, a tile or a part of one. In shared memory: what a loop seldom
// needs takes no registers there.
struct ArkAttentionStrip {
  ArkCtx* context;
  const ArkTask* task;
  ArkAttentionTile tile;
  int rows;      // of the tile; 0 behind the task's last one
  int round;     // of the task's tiles
  int left;      // rows of the round's tile behind this part
  ark_u32 zero;  // which the compiler does not know
};

// A thread's place: the group of its warp, its slab, and its part of that. With `zero` added to its
// number, what follows from it in a loop is computed in each round and takes no registers between.
template <class U>
struct ArkAttentionPlace {
  ark_u32 zero;
  int thread, lane, group, slab, part;  // thread: of the group
  ARK_DEVICE_MEMBER explicit ArkAttentionPlace(const ArkAttentionStrip& strip) {
    zero = *static_cast<const volatile ark_u32*>(&strip.zero);
    const ark_u32 own = ark_tid() + zero;
    thread = own % U::THREADS, lane = own % 32u, group = own / U::THREADS;
    slab = own / 32u % U::WARPS / U::TEAM, part = own / 32u % U::TEAM;
  }
  // Shared memory: the slab's queries, the group's slots, and behind all what the slab's warps
  // share.
  ARK_DEVICE_MEMBER int queries() const { return slab * (16 * U::PITCH); }
  ARK_DEVICE_MEMBER int ring() const { return U::RING + group * (U::SLOTS * U::SLOT); }
  ARK_DEVICE_MEMBER int team() const {
    return U::SHARED + (group * U::SLABS + slab) * U::TEAM_BYTES;
  }
};

// Where a piece of 16 bytes of a row lies.
template <int PITCH>
ARK_DEVICE int ark_attention_piece(int row, int piece) {
  return row * PITCH + piece / 8 * 128 + ((piece ^ row) & 7) * 16;
}
// What a lane adds to the address of 16 rows to load four tiles, the first 16 columns of those: the
// rows' first eight, with column 0 and then 8 (ROWS_FIRST: the next eight rows come before that).
template <int PITCH, bool ROWS_FIRST>
ARK_DEVICE ark_u32 ark_attention_lane(int lane) {
  const int low = lane / 8 % 2, high = lane / 16;
  return ark_attention_piece<PITCH>(lane % 8 + 8 * (ROWS_FIRST ? low : high),
                                    ROWS_FIRST ? high : low);
}
// The same address `step` times 16 columns on.
ARK_DEVICE ark_u32 ark_attention_step(ark_u32 at, int step) {
  return (at ^ (step & 3) << 5) + (step >> 2 << 7);
}

// Starts the copies of ROWS rows of a head to shared memory, by THREADS threads. from(row): where a
// row lies. Those before `begin` and from `end` on are others': what becomes of them nobody sees,
// but it must be finite. Columns behind a head's are zeros.
template <class U, int D, int ROWS, int THREADS, class From>
ARK_DEVICE void ark_attention_copy(ark_u32 to, int thread, int begin, int end, const From& from) {
  constexpr int ACROSS = 2 * U::STEPS;
  constexpr int LANES = ACROSS > 16 ? 32 : ACROSS > 8 ? 16 : ACROSS > 4 ? 8 : ACROSS > 2 ? 4 : 2;
  constexpr int HIGH = THREADS / LANES;  // rows at once
  const int first = thread / LANES, piece = thread % LANES;
  if (LANES != ACROSS && piece >= ACROSS) return;
  const bool here = D % 16 == 0 || 8 * piece < D;
  const auto copies = [&](const auto& clamped) {
#pragma unroll
    for (int i = 0; i < ROWS; i += HIGH) {
      const int row = first + i;
      if (ROWS % HIGH != 0 && row >= ROWS) break;
      const int place = HIGH % 8 == 0 ? ark_attention_piece<U::PITCH>(first, piece) + i * U::PITCH
                                      : ark_attention_piece<U::PITCH>(row, piece);
      ark_copy_words(to + place, from(clamped(row)) + (here ? 8 * piece : 0), here ? 16 : 0);
    }
  };
  if (begin <= 0 && end >= ROWS) {
    copies([](int row) { return row; });
  } else {
    copies([&](int row) { return row < begin ? begin : row < end ? row : end - 1; });
  }
}

// Scores of a slab's queries and of SCORES keys.
template <class U>
ARK_DEVICE void ark_attention_scores(float (&s)[U::SCORES / 2], ark_u32 queries, ark_u32 keys,
                                     const ark_u32 (&held)[U::HELD ? U::STEPS : 1][4]) {
  const typename U::type* type = nullptr;
#pragma unroll
  for (int i = 0; i < U::SCORES / 2; ++i) s[i] = 0.0f;
#pragma unroll
  for (int k = 0; k < U::STEPS; ++k) {
    ark_u32 q[4];
    if constexpr (U::HELD) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = held[k][i];
    } else {
      ark_load_tiles(q, ark_attention_step(queries, k));
    }
#pragma unroll
    for (int j = 0; j < U::SCORES / 16; ++j) {
      ark_u32 b[4];
      ark_load_tiles(b, ark_attention_step(keys, k) + j * 16 * U::PITCH);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float (&d)[4] = *reinterpret_cast<float (*)[4]>(s + 8 * j + 4 * n);
        ark_mma(d, q[0], q[1], q[2], q[3], b[2 * n], b[2 * n + 1], type);
      }
    }
  }
}

// What a warp adds up for its rows: OWN 16 columns of values, times powers, and the powers, which
// are multiplied by ones; and what powers are relative to.
template <class U>
struct ArkAttentionSums {
  float values[8 * U::OWN];
  float powers[4];  // of a row two that are the same
  float top[2];
};
ARK_DEVICE ark_u32 ark_attention_ones(const ark_bf16*) { return 0x3f803f80u; }
ARK_DEVICE ark_u32 ark_attention_ones(const ark_f16*) { return 0x3c003c00u; }

// Adds the powers of 16 keys times their values, from the step `first` on.
template <class U>
ARK_DEVICE void ark_attention_values(ArkAttentionSums<U>& sums, const ark_u32 (&p)[4],
                                     ark_u32 values, int first) {
  const typename U::type* type = nullptr;
  const ark_u32 ones = ark_attention_ones(type);
  ark_mma(sums.powers, p[0], p[1], p[2], p[3], ones, ones, type);
#pragma unroll
  for (int j = 0; j < U::OWN; ++j) {
    ark_u32 b[4];
    ark_load_tiles_turned(b, ark_attention_step(values, first + j));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float (&d)[4] = *reinterpret_cast<float (*)[4]>(sums.values + 8 * j + 4 * n);
      ark_mma(d, p[0], p[1], p[2], p[3], b[2 * n], b[2 * n + 1], type);
    }
  }
}

// cap * tanh(v), of scores on their way to powers: to some units in cap's last place.
ARK_DEVICE float ark_attention_capped(float v, float cap) {
  const float power = ark_attention_power(v * 2.88539008f);  // e^2v
  return cap - 2.0f * cap * ark_reciprocal(1.0f + power);
}

template <class U>
ARK_DEVICE void ark_attention_scale(ArkAttentionSums<U>& sums, const float (&by)[2]) {
#pragma unroll
  for (int i = 0; i < 8 * U::OWN; ++i) sums.values[i] *= by[i / 2 % 2];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] *= by[i / 2];
}

// The powers of a warp's scores, and what becomes of its sums.
template <class U>
ARK_DEVICE void ark_attention_weigh(float (&s)[U::SCORES / 2], ArkAttentionSums<U>& sums,
                                    ark_u32 (&p)[U::KEYS / 4], float factor,
                                    const ArkAttentionStrip& strip, char* shared) {
  typedef typename U::type T;
  const ArkAttentionPlace<U> w(strip);
  char* const team = shared + w.team();
  const int barrier = 2 + U::GROUPS + w.group * U::SLABS + w.slab, part = w.part;
  float m[2], keep[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) m[half] = ark_attention_largest<U::SCORES>(s, half);
  if constexpr (U::TEAM > 1) {
    float* tops = reinterpret_cast<float*>(team + U::KEYS * 32) + ark_lane() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (ark_lane() % 4 == 0) tops[16 * part + 8 * half] = m[half];
    }
    ark_attention_meet<32 * U::TEAM>(barrier);
#pragma unroll
    for (int w = 0; w < U::TEAM; ++w) {
#pragma unroll
      for (int half = 0; half < 2; ++half) m[half] = fmaxf(m[half], tops[16 * w + 8 * half]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    keep[half] = ark_attention_raise<U::SCORES>(s, sums.top[half], half, m[half], factor);
  }
  if (__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) {
    ark_attention_scale(sums, keep);
  }
  if constexpr (U::TEAM == 1) {
    ark_attention_round<T, U::KEYS>(s, p);
  } else {
    // As the product with the values takes them: a lane's four words of 16 keys.
    ark_u32 own[U::SCORES / 4];
    ark_attention_round<T, U::SCORES>(s, own);
    uint4* all = reinterpret_cast<uint4*>(team) + ark_lane();
#pragma unroll
    for (int k = 0; k < U::SCORES / 16; ++k) {
      all[32 * (part * (U::SCORES / 16) + k)] =
          make_uint4(own[4 * k], own[4 * k + 1], own[4 * k + 2], own[4 * k + 3]);
    }
    ark_attention_meet<32 * U::TEAM>(barrier);
  }
}

// A warp's sums to shared memory, and what is there added to a warp's own.
template <class U>
ARK_DEVICE void ark_attention_give(char* to, const ArkAttentionSums<U>& sums) {
  float4* at = reinterpret_cast<float4*>(to) + ark_lane();
#pragma unroll
  for (int i = 0; i < 2 * U::OWN; ++i) {
    const float* v = sums.values + 4 * i;
    at[32 * i] = make_float4(v[0], v[1], v[2], v[3]);
  }
  at[64 * U::OWN] = make_float4(sums.top[0], sums.top[1], sums.powers[0], sums.powers[2]);
}
template <class U>
ARK_DEVICE void ark_attention_take(const char* from, ArkAttentionSums<U>& sums) {
  const float4* at = reinterpret_cast<const float4*>(from) + ark_lane();
  const float4 other = at[64 * U::OWN];
  const float top[2] = {other.x, other.y}, powers[2] = {other.z, other.w};
  float keep[2], share[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float m = fmaxf(sums.top[half], top[half]);
    keep[half] = ark_attention_power(sums.top[half] - m);
    share[half] = ark_attention_power(top[half] - m);
    sums.top[half] = m;
  }
  ark_attention_scale(sums, keep);
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] += powers[i / 2] * share[i / 2];
#pragma unroll
  for (int i = 0; i < 2 * U::OWN; ++i) {
    const float4 v = at[32 * i];
    const float all[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) sums.values[4 * i + j] += all[j] * share[j / 2];
  }
}

// Stores a warp's results, through shared memory so that they leave in whole pieces. out: where the
// slab's first one belongs; of 16 rows there are the first `rows`.
template <class U, int D>
ARK_DEVICE void ark_attention_out(char* shared, const float (&v)[8 * U::OWN], int lane, int part,
                                  int rows, typename U::type* out, ark_i64 pitch) {
  typename U::type* type = nullptr;
  __syncwarp();  // what another warp has handed over there has been taken
#pragma unroll
  for (int i = 0; i < 4 * U::OWN; ++i) {
    const int row = lane / 4 + i % 2 * 8;
    char* to = shared + ark_attention_piece<U::OUT_PITCH>(row, i / 2) + lane % 4 * 4;
    *reinterpret_cast<ark_u32*>(to) = ark_pack_pair(type, v[2 * i], v[2 * i + 1]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < U::OWN; ++i) {
    const int e = 32 * i + lane, row = e / (2 * U::OWN), piece = e % (2 * U::OWN);
    const int column = 16 * U::OWN * part + 8 * piece;
    const auto all =
        *reinterpret_cast<const uint4*>(shared + ark_attention_piece<U::OUT_PITCH>(row, piece));
    const ark_u32 words[4] = {all.x, all.y, all.z, all.w};
    if (row < rows && column < D) ark_store_words(out + row * pitch + column, words);
  }
}

// One thread: goes on to the next part.
template <class U, class S, class P>
ARK_DEVICE void ark_attention_advance(ArkAttentionStrip& strip, P position) {
  if (strip.left > 0) {
    strip.tile.row += U::ROWS, strip.tile.place += U::ROWS;
  } else {
    int place = 0;
    if constexpr (P::given) place = position.p[0];
    const int* coord = strip.task->coord;
    const int round = strip.round++;
    strip.rows = 0;
    if constexpr (S::TASKS == 0) {
      if (round > 0) return;
      strip.tile = ark_attention_tile<S>(coord[0], coord[1], coord[2], place);
    } else {
      const int number = round * S::TASKS + (round % 2 == 0 ? coord[0] : S::TASKS - 1 - coord[0]);
      if (number >= S::ALL * S::BLOCKS) return;
      strip.tile = ark_attention_numbered<S>(number, place);
    }
    strip.left = strip.tile.row + S::ROWS < S::M ? S::ROWS : S::M - strip.tile.row;
  }
  strip.rows = strip.left < U::ROWS ? strip.left : U::ROWS;
  strip.left -= strip.rows;
  strip.tile = ark_attention_part<S>(strip.tile, 0, strip.rows);
}
// The first key of a group's nth block, the last block first; below 0 if it has not so many.
template <class U>
ARK_DEVICE int ark_attention_block(const ArkAttentionTile& tile, int group, int n) {
  const int block = (tile.end + U::KEYS - 1) / U::KEYS - 1 - group - n * U::GROUPS;
  return tile.begin < tile.end && block >= tile.begin / U::KEYS ? block * U::KEYS : -1;
}
// Starts the copies of keys or values of a group's nth block.
template <class U, class S, class X>
ARK_DEVICE void ark_attention_fetch(const ArkAttentionTile& tile, const X& operand, ark_u32 to,
                                    const ArkAttentionPlace<U>& w, int n) {
  const int key = ark_attention_block<U>(tile, w.group, n);
  if (key >= 0) {
    const auto from = [&](int row) {
      return ark_attention_row<S>(operand, tile.batch, tile.head / S::PER_KV, key + row);
    };
    ark_attention_copy<U, S::D, U::KEYS, U::THREADS>(to, w.thread, tile.begin - key, tile.end - key,
                                                     from);
  }
  ark_copies_begun();
}

// Masks the scores of a group's nth block.
template <class U, class S>
ARK_DEVICE void ark_attention_finish(float (&s)[U::SCORES / 2], const ArkAttentionStrip& strip,
                                     int n) {
  const ArkAttentionPlace<U> w(strip);
  const ArkAttentionTile& tile = (&strip)[w.zero].tile;
  const int key = ark_attention_block<U>(tile, w.group, n);
  const int place = tile.place + 16 * w.slab;
  const bool whole = key + U::KEYS <= ark_attention_end<S>(place) &&
                     (S::WINDOW == 0 || key >= ark_attention_first<S>(place + 15));
  if (!whole) {
    ark_attention_mask<S, U::SCORES>(s, place + w.lane / 4, key + w.part * U::SCORES);
  }
}

// A warp's share of its group's blocks. keys, values: from a task to the operand.
template <class U, class S, class K, class V>
ARK_DEVICE void ark_attention_walk(char* shared, const ArkAttentionStrip& strip, float scale,
                                   float cap, const K& keys, const V& values,
                                   ArkAttentionSums<U>& sums) {
  // With four slots, keys and values of a block are waited for together.
  constexpr bool BOTH = U::SLOTS == 4;
  const float factor = (S::CAPPED ? 1.0f : scale) * ARK_ATTENTION_LOG2E;
  const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
  ark_u32 held[U::HELD ? U::STEPS : 1][4];
  if constexpr (U::HELD) {
    const ArkAttentionPlace<U> w(strip);
    const ark_u32 queries = base + w.queries() + ark_attention_lane<U::PITCH, true>(w.lane);
#pragma unroll
    for (int k = 0; k < U::STEPS; ++k) ark_load_tiles(held[k], ark_attention_step(queries, k));
  }
  const auto slot = [&](const ArkAttentionPlace<U>& w, int item) {
    return base + w.ring() + item % U::SLOTS * U::SLOT;
  };
  const auto fetch = [&](const ArkAttentionPlace<U>& w, int item, const auto& operand) {
    ark_attention_fetch<U, S>(strip.tile, operand(*strip.task), slot(w, item), w, item / 2);
  };
  const auto filled = [&](const ArkAttentionPlace<U>& w) {
    ark_copies_but<(BOTH ? 0 : U::SLOTS - 2)>();
    ark_attention_meet<U::THREADS>(2 + w.group);
  };
#pragma unroll 1
  for (int n = 0;; ++n) {
    const ArkAttentionPlace<U> w(strip);
    filled(w);
    const int key = ark_attention_block<U>(strip.tile, w.group, n);
    if (key < 0) break;
    if (U::SLOTS > 2) fetch(w, 2 * n + 2, keys);
    if (U::SLOTS != 3) fetch(w, 2 * n + (BOTH ? 3 : 1), values);
    const int own = 16 * w.slab, place = strip.tile.place + own;
    const bool seen = own < strip.rows && key < ark_attention_end<S>(place + 15) &&
                      key + U::KEYS > ark_attention_first<S>(place);
    ark_u32 p[U::KEYS / 4];
    if (seen) {
      float s[U::SCORES / 2];
      const ark_u32 queries = base + w.queries() + ark_attention_lane<U::PITCH, true>(w.lane);
      const ark_u32 own_keys = slot(w, 2 * n) + w.part * (U::SCORES * U::PITCH) +
                               ark_attention_lane<U::PITCH, false>(w.lane);
      ark_attention_scores<U>(s, queries, own_keys, held);
      if constexpr (S::CAPPED) {
#pragma unroll
        for (int i = 0; i < U::SCORES / 2; ++i) {
          s[i] = ark_attention_capped(s[i] * (scale / cap), cap);
        }
      }
      ark_attention_finish<U, S>(s, strip, n);
      ark_attention_weigh<U>(s, sums, p, factor, strip, shared);
    }
    const ArkAttentionPlace<U> v(strip);
    if (!BOTH) {
      filled(v);
      if (U::SLOTS == 2) {
        fetch(v, 2 * n + 2, keys);
      } else {
        fetch(v, 2 * n + 3, values);
      }
    }
    if (!seen) continue;
    const ark_u32 own_values = slot(v, 2 * n + 1) + ark_attention_lane<U::PITCH, true>(v.lane);
#pragma unroll
    for (int k = 0; k < U::KEYS / 16; ++k) {
      ark_u32 powers[4];
      if constexpr (U::TEAM > 1) {
        const uint4 x = reinterpret_cast<const uint4*>(shared + v.team())[32 * k + v.lane];
        powers[0] = x.x, powers[1] = x.y, powers[2] = x.z, powers[3] = x.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) powers[i] = p[4 * k + i];
      }
      ark_attention_values<U>(sums, powers, own_values + k * 16 * U::PITCH, v.part * U::OWN);
    }
  }
}

// One part of a tile.
template <class U, class S, class Q, class K, class V, class O, class N>
ARK_DEVICE void ark_attention_strip(char* shared, const ArkAttentionStrip& strip, float scale,
                                    float cap, const Q& query, const K& keys, const V& values,
                                    const O& output, const N& sinks) {
  const ArkAttentionPlace<U> w(strip);
  const bool works = U::GROUPS * U::WARPS == ARK_WARPS || w.group < U::GROUPS;
  if (works) {
    const auto operand = query(*strip.task);
    const ark_u32 base = static_cast<ark_u32>(__cvta_generic_to_shared(shared));
    const auto from = [&](int row) {
      return ark_address(operand, 0, strip.tile.batch, strip.tile.row + row,
                         strip.tile.head * S::D);
    };
    ark_attention_copy<U, S::D, U::ROWS, U::GROUPS * U::THREADS>(
        base, w.group * U::THREADS + w.thread, 0, strip.rows, from);
    ark_copies_begun();
    const ark_u32 ring = base + w.ring();
    ark_attention_fetch<U, S>(strip.tile, keys(*strip.task), ring, w, 0);
    if (U::SLOTS > 2) {
      ark_attention_fetch<U, S>(strip.tile, values(*strip.task), ring + U::SLOT, w, 0);
    }
  }
  ark_copies_but<(U::SLOTS > 2 ? 2 : 1)>();
  ark_sync();
  ArkAttentionSums<U> sums;
#pragma unroll
  for (int i = 0; i < 8 * U::OWN; ++i) sums.values[i] = 0.0f;
  const auto sink = sinks(*strip.task);
  constexpr bool SINKS = decltype(sink)::given;
#pragma unroll
  for (int i = 0; i < 4; ++i) sums.powers[i] = SINKS && w.group == 0 ? 1.0f : 0.0f;
  sums.top[0] = sums.top[1] = -1e30f;
  if constexpr (SINKS) {
    sums.top[0] = sums.top[1] = sink.p[strip.tile.head] * ARK_ATTENTION_LOG2E;
  }
  if (works) ark_attention_walk<U, S>(shared, strip, scale, cap, keys, values, sums);
  ark_copies_but<0>();
  const ArkAttentionPlace<U> own(strip);
  char* const mine = shared + (ark_warp() - own.group * U::WARPS) * U::PART;
#pragma unroll
  for (int step = 1; step < U::GROUPS; step *= 2) {
    ark_sync();
    char* const place = mine + own.group / (2 * step) * (U::WARPS * U::PART);
    if (own.group < U::GROUPS && own.group % (2 * step) == step) ark_attention_give(place, sums);
    ark_sync();
    if (own.group % (2 * step) == 0 && own.group + step < U::GROUPS) {
      ark_attention_take(place, sums);
    }
  }
  if (U::GROUPS == 1) ark_sync();
  const int first = 16 * own.slab;
  if (own.group > 0 || first >= strip.rows) return;
  float by[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    by[half] = sums.powers[2 * half] > 0.0f ? 1.0f / sums.powers[2 * half] : 0.0f;
  }
  ark_attention_scale(sums, by);
  const auto operand = output(*strip.task);
  auto* to =
      ark_address(operand, 0, strip.tile.batch, strip.tile.row + first, strip.tile.head * S::D);
  ark_attention_out<U, S::D>(mine, sums.values, own.lane, own.part, strip.rows - first, to,
                             ark_at(operand, 0, 0, 1, 0));
}

// query, keys, values, output: from a task to the operand. position: its, likewise.
template <class U, class S, class Q, class K, class V, class O, class P, class N>
ARK_DEVICE void ark_attention_units(ArkCtx& c, const ArkTask& t, float scale, float cap,
                                    const Q& query, const K& keys, const V& values, const O& output,
                                    const P& position, const N& sinks) {
  char* const shared = ARK_SCRATCH(c);
  ArkAttentionStrip& strip = *reinterpret_cast<ArkAttentionStrip*>(shared + U::STRIP);
  if (ark_tid() == 0) {
    strip.context = &c, strip.task = &t;
    strip.round = strip.left = 0, strip.zero = 0u;
  }
#pragma unroll 1
  for (;;) {
    ark_sync();  // what was computed before has left shared memory
    if (ark_tid() == 0) ark_attention_advance<U, S>(strip, position(*strip.task));
    ark_sync();
    if (strip.rows == 0) break;
    ark_check_pages(*strip.context, keys(*strip.task), strip.tile.begin, strip.tile.end);
    ark_attention_strip<U, S>(shared, strip, scale, cap, query, keys, values, output, sinks);
  }
}
