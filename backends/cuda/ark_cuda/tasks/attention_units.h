// Attention of tiles of queries on mma.sync (FlashAttention-2, Dao 2023). The warps of a block are
// organised in slabs, teams, groups and crews:
//
// - A slab is 16 rows of queries. One warp, or a team of several warps, computes a slab, with
//   scores and sums in registers.
// - The warps of all slabs of a tile form a group. If a tile needs fewer warps than the block has,
//   there are several groups. The groups take blocks of keys round-robin, run independently, and
//   combine their results at the end. A group copies its blocks of keys and values one after
//   another to a ring of slots in shared memory.
// - All groups of a tile form a crew. If all keys of a tile are one block, there may be several
//   crews, each of one group. Crews take the task's tiles round-robin and do not wait for each
//   other.
//
// ark/tasks/attention_tiles.py describes the task.

// The sizes of the data in shared memory, in bytes unless they are counts. D: elements of a head. A
// row in shared memory has whole lines of 128 bytes. The 16-byte pieces of a line are permuted by
// the row number, so that the same piece of eight rows is in different banks. HELD: true if queries
// stay in registers.
template <typename T, int D, int SLABS_, int TEAM_, int GROUPS_, int KEYS_, int SLOTS_, bool HELD_,
          int CREWS_ = 1>
struct ArkAttentionUnits {
  typedef T type;
  static constexpr int SLABS = SLABS_, TEAM = TEAM_, GROUPS = GROUPS_, KEYS = KEYS_, SLOTS = SLOTS_;
  static constexpr bool HELD = HELD_;
  static constexpr int CREWS = CREWS_;
  static constexpr int ROWS = 16 * SLABS, WARPS = SLABS * TEAM, THREADS = 32 * WARPS;  // of a group
  static constexpr int STEPS = (D + 15) / 16;            // blocks of 16 columns of a head
  static constexpr int OWN = (STEPS + TEAM - 1) / TEAM;  // blocks of the result per warp
  static constexpr int SCORES = KEYS / TEAM;             // keys of a block per warp
  static constexpr int PITCH = (STEPS + 3) / 4 * 128;
  static constexpr int SLOT = KEYS * PITCH, RING = ROWS * PITCH;  // slots begin after the queries
  static constexpr int SHARED = RING + GROUPS * SLOTS * SLOT;     // then the data of the teams
  static constexpr int TEAM_BYTES = KEYS * 32 + TEAM * 64;
  static constexpr int SUMS = OWN * 1024, OUT_PITCH = (OWN + 3) / 4 * 128;
  // Bytes of shared memory that a warp uses after its last block of keys. They hold its sums and
  // statistics for the exchange between groups, or its results before they are stored.
  static constexpr int PART = SUMS + 512 > 16 * OUT_PITCH ? SUMS + 512 : 16 * OUT_PITCH;
  // True if a crew copies the operands of its next tile while it computes the current tile
  // (attention_ahead.h).
  static constexpr bool AHEAD = CREWS > 1 && SLOTS == 4 && HELD && WARPS * PART <= 2 * SLOT;
  // The offset of the current tile's description (ArkAttentionStrip), which is stored after all
  // other data. With several crews the description of the crew's next tile follows it.
  static constexpr int WALK = SHARED + (TEAM > 1 ? GROUPS * SLABS * TEAM_BYTES : 0);
  static constexpr int JOIN = (GROUPS > 1 ? GROUPS / 2 : 1) * WARPS * PART;
  static constexpr int STRIP = WALK > JOIN ? WALK : JOIN;
  static constexpr int BYTES = (STRIP + (CREWS > 1 ? 128 : 64) + 127) / 128 * 128;  // of a crew
  static constexpr int BARRIERS = GROUPS * (TEAM > 1 ? 1 + SLABS : 1);              // of a crew
  static_assert(CREWS * GROUPS * WARPS <= ARK_WARPS && SCORES % 16 == 0, "warps and keys");
  static_assert(2 + CREWS * BARRIERS <= 16, "a block has 16 barriers");
  static_assert(CREWS == 1 || GROUPS == 1, "a crew's barrier is that of its group");
  static_assert((ARK_RING_BYTES + ARK_LOOP_BYTES) % 128 == 0, "lines begin at multiples of 128");
};

// Waits at barrier number `barrier` (2 or higher) until COUNT threads have arrived.
template <int COUNT>
ARK_DEVICE void ark_attention_meet(int barrier) {
  __syncwarp();
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "n"(COUNT) : "memory");
}

// Waits for the other warps of this crew (the warps that compute the same tile).
template <class U>
ARK_DEVICE void ark_attention_meet_crew(int crew) {
  if constexpr (U::CREWS == 1) {
    ark_sync();
  } else {
    ark_attention_meet<U::THREADS>(2 + crew * U::BARRIERS);
  }
}

// A strip is the part of a task that a crew computes at once: a tile, or some rows of one. Its
// description is in shared memory, so that values that a loop seldom needs take no registers.
struct ArkAttentionStrip {
  ArkCtx* context;
  const ArkTask* task;
  ArkAttentionTile tile;
  int rows;      // of the strip; 0 after the task's last tile
  int round;     // the number of the crew's next tile among the task's tiles
  int left;      // rows of the current tile after this strip
  ark_u32 zero;  // a zero that the compiler does not know
};

// A thread's place among the warps: its crew, its warp's group, its slab (16 rows of queries) and
// its part of the slab. `zero` is a zero that the compiler does not know. Values that are derived
// from a thread number plus `zero` are computed again in each round of a loop, so they take no
// registers in between.
template <class U>
struct ArkAttentionPlace {
  ark_u32 zero;
  int thread, lane, crew, group, slab, part;  // thread: of the group
  ARK_DEVICE_MEMBER explicit ArkAttentionPlace(const ArkAttentionStrip& strip) {
    zero = *static_cast<const volatile ark_u32*>(&strip.zero);
    ark_u32 own = ark_tid() + zero;
    crew = 0;
    if constexpr (U::CREWS > 1) crew = own / U::THREADS, own %= U::THREADS;
    thread = own % U::THREADS, lane = own % 32u, group = own / U::THREADS;
    slab = own / 32u % U::WARPS / U::TEAM, part = own / 32u % U::TEAM;
  }
  // Addresses in shared memory: the slab's queries; the group's ring of slots; the data that the
  // slab's warps share, which is stored after the ring.
  ARK_DEVICE_MEMBER int queries() const { return slab * (16 * U::PITCH); }
  ARK_DEVICE_MEMBER int ring() const { return U::RING + group * (U::SLOTS * U::SLOT); }
  ARK_DEVICE_MEMBER int team() const {
    return U::SHARED + (group * U::SLABS + slab) * U::TEAM_BYTES;
  }
  ARK_DEVICE_MEMBER int barrier() const { return 2 + crew * U::BARRIERS; }
  // Waits until all warps of this slab (16 rows of queries) have arrived here.
  ARK_DEVICE_MEMBER void meet() const {
    ark_attention_meet<32 * U::TEAM>(barrier() + U::GROUPS + group * U::SLABS + slab);
  }
  // Waits for the other warps of this group (the warps that take the same blocks of keys).
  ARK_DEVICE_MEMBER void meet_group() const { ark_attention_meet<U::THREADS>(barrier() + group); }
  ARK_DEVICE_MEMBER void meet_crew() const { ark_attention_meet_crew<U>(crew); }
};

// The byte offset of a 16-byte piece of a row in shared memory. Pieces are permuted by the row
// number.
template <int PITCH>
ARK_DEVICE int ark_attention_piece(int row, int piece) {
  return row * PITCH + piece / 8 * 128 + ((piece ^ row) & 7) * 16;
}
// For ldmatrix: a lane's offset from the address of 16 rows, to load the first 16 columns as four 8
// x 8 tiles. The order of the tiles is: rows 0 to 7 from column 0, rows 0 to 7 from column 8, then
// the same for rows 8 to 15. With ROWS_FIRST, the second and the third tile are exchanged.
template <int PITCH, bool ROWS_FIRST>
ARK_DEVICE ark_u32 ark_attention_lane(int lane) {
  const int low = lane / 8 % 2, high = lane / 16;
  return ark_attention_piece<PITCH>(lane % 8 + 8 * (ROWS_FIRST ? low : high),
                                    ROWS_FIRST ? high : low);
}
// The address that is 16 * `step` columns to the right of `at`, an address from ark_attention_lane.
ARK_DEVICE ark_u32 ark_attention_step(ark_u32 at, int step) {
  return (at ^ (step & 3) << 5) + (step >> 2 << 7);
}

// Starts the copies of ROWS rows of a head to shared memory, by THREADS threads. from(row): the
// address of a row. Rows before `begin` and from `end` on belong to other data. Results of such
// rows are masked but must be finite, so the nearest valid row is copied in their place. Columns
// past the head's end are zeros.
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

// Called by one thread: advances `strip` to the next rows of its tile, or to the task's next tile.
template <class U, class S, class P>
ARK_DEVICE void ark_attention_advance(ArkAttentionStrip& strip, P position) {
  if (strip.left > 0) {
    strip.tile.row += U::ROWS, strip.tile.place += U::ROWS;
  } else {
    const int place = ark_attention_place<S>(position);
    const int* coord = strip.task->coord;
    const int round = strip.round;
    strip.round += U::CREWS;
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
// The first key of a group's nth block, counted from the last block; negative if there is no such
// block.
template <class U>
ARK_DEVICE int ark_attention_block(const ArkAttentionTile& tile, int group, int n) {
  const int block = (tile.end + U::KEYS - 1) / U::KEYS - 1 - group - n * U::GROUPS;
  return tile.begin < tile.end && block >= tile.begin / U::KEYS ? block * U::KEYS : -1;
}
// Starts the copies to shared memory, at `to`, of the keys or values of the nth block of keys that
// a group of warps processes.
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
