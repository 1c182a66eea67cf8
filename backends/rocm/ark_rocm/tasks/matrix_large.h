// Large tiles of products of 16-bit types on CDNA's matrix units. A wave computes several blocks of
// 32 x 32, in steps of 32 along k. While a step is multiplied, the next step is copied from
// registers to shared memory, and the step after the next is loaded from memory to registers. A
// wave reads its operands half a step before they are multiplied, so that matrix units have work on
// both sides of a barrier.

#if defined(__GFX9__)
typedef float ark_large_sums __attribute__((ext_vector_type(16)));

constexpr int ARK_LARGE = 32;  // rows and columns of a block
constexpr int ARK_DEEP = 32;   // elements along k in a step
constexpr int ARK_HALF_PIECES = 2;

// Wait until all but the last LEFT accesses of this wave are complete: ark_await_local for accesses
// to shared memory, ark_await_loads for loads from global memory. They use the builtin of
// s_waitcnt, which the compiler takes into account, so that it inserts no second wait. In the
// builtin's argument, the fields of counters that are not waited for have their maximum.
template <int LEFT>
ARK_DEVICE void ark_await_local() {
  __builtin_amdgcn_s_waitcnt(0xc07f | LEFT << 8);
}
template <int LEFT>
ARK_DEVICE void ark_await_loads() {
  __builtin_amdgcn_s_waitcnt(0x0f70 | LEFT);
}

// The lane layout of a block. Lane l holds row l % 32 of the left operand and column l % 32 of the
// right operand. Of every 16 elements of k it holds the 8 from 8 * (l / 32) on. Its sum e belongs
// to row 8 * (e / 4) + 4 * (l / 32) + e % 4 and column l % 32. An instruction that multiplies only
// 8 elements of k may use any 8 of the 16, if they are the same for both operands.
ARK_DEVICE int ark_large_row(int e) { return e / 4 * 8 + ark_lane() / 32 * 4 + e % 4; }

#if defined(__gfx950__)
constexpr int ARK_LARGE_PARTS = 1;  // instructions for 16 elements of k
#define ARK_LARGE_MULTIPLY(type, wide) __builtin_amdgcn_mfma_f32_32x32x16_##wide
#else
constexpr int ARK_LARGE_PARTS = 2;
#define ARK_LARGE_MULTIPLY(type, wide) __builtin_amdgcn_mfma_f32_32x32x8##type
#endif
template <typename T>
struct ArkLargePart {
  typedef T type __attribute__((ext_vector_type(8 / ARK_LARGE_PARTS)));
  // Returns the elements of a piece (8 elements of k) that instruction number `part` multiplies.
  ARK_DEVICE type of(ark_u16x8 piece, int part) {
    struct Parts {
      type part[ARK_LARGE_PARTS];
    };
    return __builtin_bit_cast(Parts, piece).part[part];
  }
};
ARK_DEVICE ark_large_sums ark_large_multiply(const ark_f16*, ark_u16x8 a, ark_u16x8 b,
                                             ark_large_sums sums, int part) {
  typedef ArkLargePart<_Float16> Part;
  return ARK_LARGE_MULTIPLY(f16, f16)(Part::of(a, part), Part::of(b, part), sums, 0, 0, 0);
}
ARK_DEVICE ark_large_sums ark_large_multiply(const ark_bf16*, ark_u16x8 a, ark_u16x8 b,
                                             ark_large_sums sums, int part) {
#if defined(__gfx950__)
  typedef ArkLargePart<__bf16> Part;
#else
  typedef ArkLargePart<short> Part;
#endif
  return ARK_LARGE_MULTIPLY(bf16_1k, bf16)(Part::of(a, part), Part::of(b, part), sums, 0, 0, 0);
}

// Copies one operand of a step (ROWS rows, 32 elements of k) from memory to registers and from
// there to shared memory. A row of the right operand is a column of the matrix. A piece is 8
// elements of k of a row, 16 bytes. In shared memory, piece p of the row in slot s is at (p * PITCH
// + s) * 16 bytes; slot(row) gives the slot of a row. The layout avoids bank conflicts of reads and
// writes.
//
// ALONG_K: k is contiguous in memory. A thread then loads whole pieces. Slots are in the order of
// rows, so 32 lanes that read neighbouring rows access different banks. PITCH has two slots more
// than there are rows, so lanes that write four pieces of two rows access different banks too.
//
// Otherwise rows are contiguous in memory. A thread then loads a group of GROUP neighbouring rows
// at four indices of k and writes half a piece of each row. Within every 128 rows, the slots are
// ordered by the index of a row in its group: first the rows with index 0 of all groups, then those
// with index 1, and so on. So 16 lanes that write rows of equal index write neighbouring slots.
// Between two indices (CHUNK + 8) / GROUP slots are used instead of CHUNK / GROUP, so that lanes
// that read neighbouring rows access different banks. The addresses of two writes of a thread are
// close enough for one instruction.
template <int ROWS, bool ALONG_K, int BUFFERS, int AHEAD, typename T>
struct ArkLargeStep {
  static constexpr int CHUNK = 128;  // rows whose slots are ordered together
  static constexpr int PITCH = ALONG_K ? ROWS + 2 : ROWS + ROWS / CHUNK * 8;
  static constexpr int MINE = ROWS * ARK_DEEP / ARK_PIECE / ARK_THREADS;  // pieces per thread
  static constexpr int GROUP = 2 * MINE, GROUPS = ROWS / GROUP;
  static constexpr int WIDE = ALONG_K ? ARK_PIECE : GROUP;  // elements of a load
  static constexpr int LOADS = ALONG_K ? MINE : ARK_PIECE / 2;
  static constexpr int NEAR = ARK_DEEP * sizeof(T);  // bytes of k of a step
  static constexpr int BYTES = PITCH * ARK_DEEP / ARK_PIECE * 16;
  static_assert(MINE == 1 || MINE == 2, "128 or 256 rows for 8 waves");
  typedef ark_u32 load __attribute__((ext_vector_type(WIDE / 2)));
  load loads[AHEAD][LOADS];  // the loads of step s are in loads[s % AHEAD]
  // base: the address of the next step. stride: bytes between steps. Both are used only if all
  // steps are inside of the matrix.
  ark_u64 base, stride;
  ark_u32 offsets[LOADS];
  ark_local *even, *odd;  // the address of the thread's first piece in each buffer

  ARK_METHOD static constexpr int slot(int row) {
    if (ALONG_K) return row;
    const int within = row % CHUNK;
    return row / CHUNK * (CHUNK + 8) + within % GROUP * ((CHUNK + 8) / GROUP) + within / GROUP;
  }
  // row_of(i): the first row of this thread's load i. k_of(i): the index of k of the load. If rows
  // are contiguous in memory, eight neighbouring lanes load neighbouring groups of rows, and the
  // next eight lanes load the same groups at indices of k that are four larger.
  ARK_METHOD static int row_of(int i) {
    if (ALONG_K) return (ark_tid() + i * ARK_THREADS) / 4;
    return (ark_tid() / 16 * 8 + ark_tid() % 8) % GROUPS * GROUP;
  }
  ARK_METHOD static int k_of(int i) {
    if (ALONG_K) return ark_tid() % 4 * ARK_PIECE;
    return ark_tid() / (2 * GROUPS) * ARK_PIECE + ark_tid() / 8 % 2 * LOADS + i;
  }
  // True if loads need no tests of bounds. Rows beyond the matrix are then replaced by its last
  // rows; their sums are not stored.
  ARK_METHOD bool inside(const ArkSide<T>& side) const {
    const ark_i64 near = ALONG_K ? side.k_stride : side.row_stride;
    const ark_i64 far = ALONG_K ? side.row_stride : side.k_stride;
    const bool aligned = (reinterpret_cast<ark_u64>(side.at) & (sizeof(load) - 1u)) == 0u;
    return near == 1 && aligned && far % WIDE == 0 && far > 0 && far < (1 << 20) &&
           side.depth % ARK_DEEP == 0 && (ALONG_K || side.rows % GROUP == 0);
  }
  // tile: the address of the first buffer. bytes: the size of a buffer.
  ARK_METHOD void begin(ark_local* tile, int bytes) {
    const int k = k_of(0), within = ALONG_K ? 0 : k % ARK_PIECE * 2;
    const int at = (k / ARK_PIECE * PITCH + slot(row_of(0))) * 16 + within;
    even = ark_kept(tile + at);
    odd = BUFFERS == 1 ? even : ark_kept(tile + bytes + at);
  }
  ARK_METHOD void begin_inside(const ArkSide<T>& side) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = row_of(i), last = side.rows - (ALONG_K ? 1 : GROUP);
      const ark_i64 at = (row < last ? row : last) * side.row_stride + k_of(i) * side.k_stride;
      offsets[i] = static_cast<ark_u32>(at) * sizeof(T);
    }
    base = ark_uniform(reinterpret_cast<ark_u64>(side.at));
    stride = NEAR * ark_uniform(static_cast<ark_u64>(side.k_stride));
  }
  // Issues this thread's loads number `begin` to `end` - 1 of step s.
  ARK_METHOD void fetch_inside(int s, int begin, int end) {
    // If k is contiguous in memory, the distance between steps is a constant. Therefore every
    // second step uses the base address of the preceding step, with a constant offset in its load
    // instructions.
    const bool odd = ALONG_K && s % 2 == 1;
    const auto* from = (const ark_global<char>*)base + (odd ? NEAR : 0);
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      if (i < begin || i >= end) continue;
      // An empty instruction makes the compiler keep the offset in a 32-bit register. The load
      // instruction adds the offset to the base.
      asm volatile("" : "+v"(offsets[i]));
      loads[s % AHEAD][i] = *(const ark_global<load>*)(from + offsets[i]);
    }
  }
  // Advances the base address to the next step. Called after all loads of step s were issued.
  ARK_METHOD void go_on(int s) {
    if (ALONG_K) {
      base += s % 2 == 1 ? 2 * NEAR : 0;
    } else {
      base += stride;
    }
    asm volatile("" : "+s"(base));  // keeps the compiler from computing base from the loop counter
  }
  ARK_METHOD void fetch(const ArkSide<T>& side, int s) {
    const int k0 = s * ARK_DEEP;
    const auto* from = (const ark_global<ark_u16>*)side.at;
    const auto element = [&](int row, int k) -> ark_u32 {
      if (row >= side.rows || k >= side.depth) return 0u;
      return from[row * side.row_stride + k * side.k_stride];
    };
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int row = row_of(i), k = k0 + k_of(i);
#pragma unroll
      for (int e = 0; e < WIDE / 2; ++e) {
        const ark_u32 first = ALONG_K ? element(row, k + 2 * e) : element(row + 2 * e, k);
        const ark_u32 second = ALONG_K ? element(row, k + 2 * e + 1) : element(row + 2 * e + 1, k);
        loads[s % AHEAD][i][e] = first | second << 16;
      }
    }
  }
  ARK_METHOD void place(int s) const {
    ark_local* to = s % BUFFERS == 0 ? even : odd;
    const load(&held)[LOADS] = loads[s % AHEAD];
    if constexpr (ALONG_K) {
      constexpr int NEXT = ARK_THREADS / 4 * 16;
#pragma unroll
      for (int i = 0; i < MINE; ++i) *(ark_in_local<ark_u32x4>*)(to + i * NEXT) = held[i];
    } else {
      typedef ark_u32 half __attribute__((ext_vector_type(LOADS / 2)));
#pragma unroll
      for (int row = 0; row < GROUP; ++row) {
        half turned;
#pragma unroll
        for (int e = 0; e < LOADS / 2; ++e) {
          turned[e] = __builtin_amdgcn_perm(held[2 * e + 1][row / 2], held[2 * e][row / 2],
                                            row % 2 == 0 ? 0x05040100u : 0x07060302u);
        }
        *(ark_in_local<half>*)(to + slot(row) * 16) = turned;
      }
    }
  }
};

// A wave's elements of one operand for half a step (16 elements of k). They belong to BLOCKS
// blocks, which are STRIDE rows apart.
template <int BLOCKS, int STRIDE, typename SIDE>
struct ArkLargeHalf {
  ark_u16x8 piece[BLOCKS];

  ARK_METHOD void clear() {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) piece[i] = 0;
  }
  // at: the address of this lane's elements in the wave's first block.
  ARK_METHOD void read(const ark_local* at, int half) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
      const int offset = (half * ARK_HALF_PIECES * SIDE::PITCH + SIDE::slot(i * STRIDE)) * 16;
      piece[i] = *(const ark_in_local<ark_u16x8>*)(at + offset);
    }
  }
};

// Like ark_matrix_tile of matrix.h, for tiles of 128 or 256 rows and columns.
template <int TM, int TN, int WAVES_M, int WAVES_N, int BUFFERS, bool A_ALONG_K, bool B_ALONG_K,
          typename T, class End>
ARK_DEVICE void ark_large_tile(char* shared, const ArkSide<T>& a, const ArkSide<T>& b,
                               const End& end) {
  static_assert(WAVES_M * WAVES_N == ARK_WARPS, "every wave has its place");
  constexpr int BLOCKS_M = TM / ARK_LARGE / WAVES_M, BLOCKS_N = TN / ARK_LARGE / WAVES_N;
  static_assert(BLOCKS_M % 2 == 0, "two halves of a wave's rows");
  static_assert(4 % WAVES_M == 0 && 4 % WAVES_N == 0, "a wave's blocks are as far apart as rows 0");
  // The number of steps whose loads from memory are in flight at the same time.
  constexpr int AHEAD = TM * TN < 256 * 256 ? 2 : 1;
  typedef ArkLargeStep<TM, A_ALONG_K, BUFFERS, AHEAD, T> StepA;
  typedef ArkLargeStep<TN, B_ALONG_K, BUFFERS, AHEAD, T> StepB;
  typedef ArkLargeHalf<BLOCKS_M, WAVES_M * ARK_LARGE, StepA> HalfA;
  typedef ArkLargeHalf<BLOCKS_N, WAVES_N * ARK_LARGE, StepB> HalfB;
  constexpr int STEP = StepA::BYTES + StepB::BYTES;
  const int wave_m = ark_warp() % WAVES_M, wave_n = ark_warp() / WAVES_M;
  const int row = ark_lane() % ARK_LARGE, piece = ark_lane() / ARK_LARGE;
  auto* tile_a = (ark_local*)shared;
  ark_local* tile_b = tile_a + StepA::BYTES;
  const ark_local* mine_a =
      ark_kept(tile_a + (piece * StepA::PITCH + StepA::slot(wave_m * ARK_LARGE + row)) * 16);
  const ark_local* mine_b =
      ark_kept(tile_b + (piece * StepB::PITCH + StepB::slot(wave_n * ARK_LARGE + row)) * 16);
  ark_large_sums sums[BLOCKS_M][BLOCKS_N];
#pragma unroll
  for (int i = 0; i < BLOCKS_M; ++i) {
#pragma unroll
    for (int j = 0; j < BLOCKS_N; ++j) sums[i][j] = 0.0f;
  }
  HalfA first_a, second_a;
  HalfB first_b, second_b;
  second_a.clear();
  second_b.clear();
  StepA step_a;
  StepB step_b;
  const int steps = (a.depth + ARK_DEEP - 1) / ARK_DEEP;
  // Multiplies half of the wave's rows of blocks, those from `begin` on.
  const auto multiply = [&](const HalfA& x, const HalfB& y,
                            int begin) __attribute__((always_inline)) {
#pragma unroll
    for (int part = 0; part < ARK_LARGE_PARTS; ++part) {
#pragma unroll
      for (int i = begin; i < begin + BLOCKS_M / 2; ++i) {
#pragma unroll
        for (int j = 0; j < BLOCKS_N; ++j) {
          sums[i][j] = ark_large_multiply(b.at, x.piece[i], y.piece[j], sums[i][j], part);
        }
      }
    }
    // This scheduling barrier keeps the compiler from moving instructions across it.
    __builtin_amdgcn_sched_barrier(0);
  };
  step_a.begin(tile_a, STEP);
  step_b.begin(tile_b, STEP);
  const auto place = [&](int s) __attribute__((always_inline)) {
    step_a.place(s);
    step_b.place(s);
  };
  // With enough buffers and registers, a step's loads are issued one by one between products, two
  // steps ahead. Otherwise they are issued all at once, after the step's registers were copied to
  // shared memory.
  constexpr bool SPREAD = BUFFERS > 1 && AHEAD > 1;
  constexpr int PARTS = SPREAD ? 4 : 1;
  // fetch(s, part): loads a part of step s from memory to registers. Past the last step it loads
  // any existing data.
  const auto run = [&](const auto& fetch) __attribute__((always_inline)) {
    // Copies step s + 1 from registers to shared memory. later: true if loads of steps after that
    // one were issued.
    const auto hand_on = [&](int s, bool later) __attribute__((always_inline)) {
      if (later) {
        ark_await_loads<(AHEAD - 1) * (StepA::LOADS + StepB::LOADS)>();
      } else {
        ark_await_loads<0>();
      }
      __builtin_amdgcn_sched_barrier(0);
      place(s + 1);
      __builtin_amdgcn_sched_barrier(0);
    };
    const auto step = [&](int s, bool later, bool more) __attribute__((always_inline)) {
      const int now = s % BUFFERS * STEP;
      const auto ask = [&](int part) __attribute__((always_inline)) {
        if (more) fetch(s + 1 + AHEAD, part);
        __builtin_amdgcn_sched_barrier(0);
      };
      first_a.read(mine_a + now, 0);
      first_b.read(mine_b + now, 0);
      __builtin_amdgcn_sched_barrier(0);
      multiply(second_a, second_b, 0);
      if (SPREAD) {
        hand_on(s, later);
        ask(0);
      }
      multiply(second_a, second_b, BLOCKS_M / 2);
      if (SPREAD) ask(1);
      second_a.read(mine_a + now, 1);
      second_b.read(mine_b + now, 1);
      // Waits for all reads from shared memory at once, instead of before each product. The reads
      // were in flight while the matrix units were busy, so this wait is short.
      ark_await_local<BLOCKS_M + BLOCKS_N>();
      __builtin_amdgcn_sched_barrier(0);
      multiply(first_a, first_b, 0);
      if (SPREAD) {
        ask(2);
      } else {
        if (BUFFERS == 1) ark_sync();
        hand_on(s, later);
        ask(0);
      }
      multiply(first_a, first_b, BLOCKS_M / 2);
      if (SPREAD) ask(3);
      ark_sync();
    };
#pragma unroll
    for (int s = 0; s <= AHEAD; ++s) {
      if (s >= steps) continue;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) fetch(s, part);
      if (s == 0) place(0);
    }
    ark_sync();
    int s = 0;  // unrolled by two, so that the registers of a step are known at compile time
#pragma unroll 1
    for (; s < steps - AHEAD - 2; s += 2) {
      step(s, true, true);
      step(s + 1, true, true);
    }
#pragma unroll
    for (int last = 0; last < AHEAD + 2; ++last) {
      if (s + last < steps) step(s + last, false, last == 0 && s + 1 + AHEAD < steps);
    }
    multiply(second_a, second_b, 0);
    multiply(second_a, second_b, BLOCKS_M / 2);
  };
  if (step_a.inside(a) && step_b.inside(b)) {
    step_a.begin_inside(a);
    step_b.begin_inside(b);
    run([&](int s, int part) __attribute__((always_inline)) {
      constexpr int ALL = StepA::LOADS + StepB::LOADS;
      const int begin = ALL * part / PARTS, end = ALL * (part + 1) / PARTS;
      step_a.fetch_inside(s, begin, end);
      step_b.fetch_inside(s, begin - StepA::LOADS, end - StepA::LOADS);
      if (part + 1 < PARTS) return;
      step_a.go_on(s);
      step_b.go_on(s);
    });
  } else {
    run([&](int s, int part) __attribute__((always_inline)) {
      if (part > 0) return;
      step_a.fetch(a, s);
      step_b.fetch(b, s);
    });
  }
  constexpr int DOWN = WAVES_M * ARK_LARGE, ACROSS = WAVES_N * ARK_LARGE;
  ark_tile_blocks<ARK_LARGE, DOWN, ACROSS>(shared, sums, wave_m * ARK_LARGE, wave_n * ARK_LARGE,
                                           a.rows, b.rows, ark_large_row, end);
}
#endif
