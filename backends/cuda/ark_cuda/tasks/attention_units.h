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
  // Waits for the slab's other warps.
  ARK_DEVICE_MEMBER void meet() const {
    ark_attention_meet<32 * U::TEAM>(2 + U::GROUPS + group * U::SLABS + slab);
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
// row lies. Rows before `begin` and from `end` on belong to others: their results are masked, but
// must be finite. Columns past a head's are zeros.
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

// One thread: goes on to the next part.
template <class U, class S, class P>
ARK_DEVICE void ark_attention_advance(ArkAttentionStrip& strip, P position) {
  if (strip.left > 0) {
    strip.tile.row += U::ROWS, strip.tile.place += U::ROWS;
  } else {
    const int place = ark_attention_place<S>(position);
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
