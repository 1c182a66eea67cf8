// A linear layer of two to eight input rows, one per sequence of a batch, in the kernel variant
// `roles`. It works like linear_roles.h, but computes on matrix units (mma.m16n8k16), where eight
// input rows take as long as one. A row of weights is divided along k into equal parts. A stage of
// the ring holds one part of 8 or 16 rows of weights, and is multiplied by the same part of the
// input rows. With two input rows a stage may instead hold four whole rows of weights
// (linear_pair.h). If the input is too large to be copied to shared memory beside the ring, each
// warp loads the elements that it needs for a stage from global memory.

// The bytes of padding after each input row in shared memory, which avoid bank conflicts.
constexpr int ARK_ROW_PAD = 64;

ARK_DEVICE uint4 ark_either(bool first, const uint4& a, const uint4& b) {
  return make_uint4(first ? a.x : b.x, first ? a.y : b.y, first ? a.z : b.z, first ? a.w : b.w);
}

// Multiplies M input rows by R rows of weights, at most 8 rows each, with K elements per row. Both
// are in shared memory; input rows are PITCH elements apart, rows of weights K elements. The input
// is the left operand of the instruction. The other eight of that operand's sixteen rows are zero.
// To hide latency, DEEP pieces of 32 elements of k are loaded while the previous DEEP pieces are
// multiplied, and each of the DEEP pieces has its own sums.
template <int M, int R, int K, int PITCH, typename T>
ARK_DEVICE void ark_flat_products(const T* w, const T* x, float (&sum)[2]) {
  constexpr int ALL = K / 32, DEEP = ALL % 4 == 0 ? 4 : ALL % 2 == 0 ? 2 : 1;
  const int row = ark_lane() / 4, piece = ark_lane() % 4 * 8;
  const uint4* from = reinterpret_cast<const uint4*>(x + row * PITCH + piece);
  const uint4* by = reinterpret_cast<const uint4*>(w + row * K + piece);
  const uint4 none = make_uint4(0u, 0u, 0u, 0u);
  float d[DEEP][2][4] = {};
  uint4 a[DEEP], b[DEEP];
  const auto ask = [&](int first) {
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      a[i] = row < M ? from[4 * (first + i)] : none;
      b[i] = row < R ? by[4 * (first + i)] : none;
    }
  };
  ask(0);
#pragma unroll 1
  for (int first = DEEP; first <= ALL; first += DEEP) {
    uint4 x0[DEEP], w0[DEEP];
#pragma unroll
    for (int i = 0; i < DEEP; ++i) x0[i] = a[i], w0[i] = b[i];
    if (first < ALL) ask(first);
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
      ark_mma(d[i][0], x0[i].x, 0u, x0[i].y, 0u, w0[i].x, w0[i].y, w);
      ark_mma(d[i][1], x0[i].z, 0u, x0[i].w, 0u, w0[i].z, w0[i].w, w);
    }
  }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    sum[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) sum[e] += d[i][0][e] + d[i][1][e];
  }
}

// Adds to d the products of R rows of weights in shared memory with the input rows, over BLOCKS
// blocks of 32 elements of k. Rows of weights are PART elements apart. x(i): this lane's elements
// of block i of input row `ark_lane() / 4`. All rows of weights start at the same bank, so lanes of
// neighbouring rows load each pair of blocks in opposite order. There are D independent sums to
// hide latency.
template <int R, int PART, int BLOCKS, int UNROLLED, int D, typename T, class X>
ARK_DEVICE void ark_tile_products(const T* w, const X& x, float (&d)[D][4]) {
  using Tile = ArkRowsTile<true, R, 8>;
  const bool there = Tile::row() < R, odd = (ark_lane() / 4 & 1) != 0;
  const uint4* upper = reinterpret_cast<const uint4*>(w + Tile::row() * PART) + ark_lane() % 4;
  const uint4* lower = upper + PART / 8;
  const uint4 none = make_uint4(0u, 0u, 0u, 0u);
  const auto multiply = [&](int at, const uint4& u, const uint4& l, const uint4& b) {
    ark_mma(d[at], u.x, l.x, u.y, l.y, b.x, b.y, w);
    ark_mma(d[at + 1], u.z, l.z, u.w, l.w, b.z, b.w, w);
  };
#pragma unroll UNROLLED
  for (int i = 0; i < BLOCKS / 2 * 2; i += 2) {
    const int one = (odd ? i + 1 : i) * 4, other = (odd ? i : i + 1) * 4;
    const uint4 u0 = there ? upper[one] : none, l0 = there ? lower[one] : none;
    const uint4 u1 = there ? upper[other] : none, l1 = there ? lower[other] : none;
    multiply(0, ark_either(odd, u1, u0), ark_either(odd, l1, l0), x(i));
    multiply(D - 2, ark_either(odd, u0, u1), ark_either(odd, l0, l1), x(i + 1));
  }
  if constexpr (BLOCKS % 2 != 0) {
    constexpr int LAST = BLOCKS - 1;
    multiply(0, there ? upper[LAST * 4] : none, there ? lower[LAST * 4] : none, x(LAST));
  }
}

// Adds up the sums of the P stages that hold the parts along k of the same rows of weights. Each of
// these stages was multiplied by one warp, which calls this function with its sums in `sum`. The
// warp that completes its stage last gets the totals in `sum`, added in the order of the parts, and
// returns true. parts: the sums of the last KEPT stages, in shared memory. counts: for each group
// of P stages, how many of them are complete.
template <class Tile, int RM, int P, int KEPT>
ARK_DEVICE bool ark_batch_total(int stage, float* parts, ark_u32* counts, float (&sum)[Tile::ALL]) {
  static_assert(KEPT % P == 0, "rows are kept whole");
  const int place = stage % KEPT, rows = place / P;
  volatile float* own = parts + rows * P * RM;
#pragma unroll
  for (int e = 0; e < Tile::ALL; ++e) {
    const int at = Tile::at(e);
    if (at >= 0) own[place % P * RM + at] = sum[e];
  }
  // By the atomic addition to the count, lane 0 releases its warp's stores and acquires those of
  // the other warps. __syncwarp extends this to all lanes; a shuffle would not order memory.
  __syncwarp();
  ark_u32 before = 0u;
  if (ark_lane() == 0) {
    __threadfence_block();
    before = atomicAdd(&counts[rows], 1u);
    __threadfence_block();
  }
  before = __shfl_sync(0xffffffffu, before, 0);
  __syncwarp();
  if (before % P != P - 1) return false;
#pragma unroll
  for (int e = 0; e < Tile::ALL; ++e) {
    const int at = Tile::at(e);
    sum[e] = 0.0f;
#pragma unroll
    for (int i = 0; at >= 0 && i < P; ++i) sum[e] += own[i * RM + at];
  }
  return true;
}

// Returns the number, within the task, of the first stage that belongs to this warp.
ARK_DEVICE int ark_first_stage(const ArkCtx& c, const ArkTask& t) {
  const ark_u32 before = (ark_stages_before(c) + t.fetch_begin) % ARK_WARPS;
  return static_cast<int>((static_cast<ark_u32>(ark_warp()) + ARK_WARPS - before) % ARK_WARPS);
}

// Computes a linear layer of M input rows for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1. The weights have type W and K elements per row. A stage (slot of the ring in
// shared memory) has one of P equal parts of R rows of weights. KEPT: see ark_batch_total. XS:
// bytes of shared memory for the M input rows. BOXED: true if box copies load the stages. Returns
// false if a wait has failed or the launch was aborted; the processor must then leave the loop.
template <typename W, int K, int R, int P, int KEPT, bool BOXED, int XS, int M, class X, class N,
          class S>
ARK_DEVICE bool ark_linear_batch(ArkCtx& c, const ArkTask& t, X input, const N& prologue,
                                 S epilogue) {
  constexpr int PITCH = K + ARK_ROW_PAD / static_cast<int>(sizeof(W)), PART = K / P;
  constexpr bool UNITS = !BOXED && ARK_PAIR_BY_UNITS<R, M, PART, W>;
  using Tile = typename ArkTileOf<UNITS, R, M>::Tile;
  W* xs = reinterpret_cast<W*>(ARK_SCRATCH(c));
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c) + XS);
  float* parts = squares + ARK_WARPS * M;
  ark_u32* counts = reinterpret_cast<ark_u32*>(parts + KEPT * R * M);
  const int end = t.coord[1], column = Tile::column();
  const int first = ark_first_stage(c, t);
  const auto row_of = [&](int j) { return t.coord[0] + j / P * R + Tile::row(); };
  float ahead[Tile::COLUMNS][1][2] = {};
  if constexpr (!S::WAITS) ark_tile_ahead<Tile>(c, epilogue, row_of(first), end, ahead);
  ark_tile_begin<Tile>(epilogue);
  constexpr bool ROUNDED = ARK_ROUNDED<decltype(input.p), W>;
  float factor[N::norm && !ROUNDED ? 2 * ARK_ROW_PAIRS<K> : 1];
  uint4 factors[N::norm && ROUNDED ? ARK_ROW_EIGHTS<K> : 1];
  if constexpr (N::norm && ROUNDED) {
    ark_eight_factors<K>(prologue.weight.p, factors);
  } else if constexpr (N::norm) {
    ark_row_factors<K>(prologue.weight.p, factor);
  }
  if (!ark_enter(c)) return false;
  if constexpr (S::WAITS) ark_tile_ahead<Tile>(c, epilogue, row_of(first), end, ahead);
  if constexpr (P > 1) {
    for (int i = ark_tid(); i < KEPT / P; i += ARK_THREADS) counts[i] = 0u;
  }
  float square[M] = {};
  if constexpr (ROUNDED) {
    ark_batch_eights<M, K, PITCH, N::norm, BOXED>(input.p, factors, xs, square);
  } else {
    ark_batch_rows<M, K, PITCH, N::norm, BOXED>(c, input.p, factor, xs, square, X::system);
  }
  const ark_u32 gathered = ark_gather_stored();
  ark_u32 squared = 0u;
  if constexpr (N::norm) {
#pragma unroll
    for (int i = 0; i < M; ++i) {
      const float all = ark_warp_sum(square[i]);
      if (ark_lane() == 0) squares[ark_warp() * M + i] = all;
    }
    squared = ark_squares_stored();
  }
  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  const W* w = nullptr;
  if (first < stages) w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + first));
  ark_gather_wait(gathered);
  float scale[2] = {1.0f, 1.0f};
  for (int j = first; j < stages; j += ARK_WARPS) {
    if (j != first) {
      ark_tile_ahead<Tile>(c, epilogue, row_of(j), end, ahead);
      w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + j));
    }
    const W* part = xs + j % P * PART;
    float sum[Tile::ALL];
    if constexpr (BOXED) {
      using Box = ArkBox<R, M>;
      const uint4* own =
          reinterpret_cast<const uint4*>(part + Box::input() * PITCH) + ark_lane() % 4;
      const auto x = [&](int i, int half) { return own[i * 8 + half * 4]; };
      float d[Box::SETS][Box::CHAINS][4] = {};
      ark_box_products<R, M, PART / ARK_BOX_BLOCK, 8>(w, x, d);
      ark_box_tile<R, M>(d, sum);
    } else if constexpr (UNITS) {
      ark_pair_products<PART, PITCH>(w, part, sum);
    } else if constexpr (R > 8) {
      const uint4* own = reinterpret_cast<const uint4*>(part + ark_lane() / 4 * PITCH);
      const auto x = [&](int i) {
        return ark_lane() / 4 < M ? own[i * 4 + ark_lane() % 4] : make_uint4(0u, 0u, 0u, 0u);
      };
      float d[4][4] = {};
      ark_tile_products<R, PART, PART / 32, 4>(w, x, d);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = (d[0][e] + d[1][e]) + (d[2][e] + d[3][e]);
    } else {
      ark_flat_products<M, R, PART, PITCH>(w, part, sum);
    }
    ark_stage_done(c, t.fetch_begin + j);
    if constexpr (N::norm) {
      if (j == first) {  // only after the stage was released: the loading warp needs its slot
        ark_squares_wait(squared);
#pragma unroll
        for (int e = 0; e < Tile::COLUMNS; ++e) {
          const int own = column + e < M ? column + e : 0;
          float all = 0.0f;
#pragma unroll
          for (int i = 0; i < ARK_WARPS; ++i) all += squares[i * M + own];
          scale[e] = ark_rsqrt(all / K + prologue.eps);
        }
      }
    }
    if constexpr (P > 1) {
      if (!ark_batch_total<Tile, R * M, P, KEPT>(j, parts, counts, sum)) continue;
    }
    ark_tile_store<Tile>(c, epilogue, row_of(j), end, sum, scale, ahead);
  }
  ark_tile_finish<Tile>(t, epilogue, parts + (P > 1 ? KEPT * (R * M + 1) : 0));
  return true;
}

// Like ark_linear_batch, for an input that has the weights' type and stays in global memory. A warp
// loads the part that it needs for a stage while the stage is in flight.
template <typename W, int K, int R, int P, int KEPT, bool BOXED, int M, class X, class S>
ARK_DEVICE bool ark_linear_apart(ArkCtx& c, const ArkTask& t, X input, S epilogue) {
  constexpr int PART = K / P, ALL = PART / 32, ROUND = ALL < 16 ? ALL : 16;
  static_assert(ALL % ROUND == 0, "a lane has registers for so much at once");
  float* parts = reinterpret_cast<float*>(ARK_SCRATCH(c));
  ark_u32* counts = reinterpret_cast<ark_u32*>(parts + KEPT * R * M);
  using Tile = ArkRowsTile<true, R, M>;
  const float scale[2] = {1.0f, 1.0f};
  using Box = ArkBox<BOXED ? R : 16, M>;
  const int end = t.coord[1], own = BOXED ? Box::input() : ark_lane() / 4;
  const int first = ark_first_stage(c, t);
  const auto row_of = [&](int j) { return t.coord[0] + j / P * R + Tile::row(); };
  float ahead[Tile::COLUMNS][1][2] = {};
  if constexpr (!S::WAITS) ark_tile_ahead<Tile>(c, epilogue, row_of(first), end, ahead);
  if (!ark_enter(c)) return false;
  if constexpr (S::WAITS) ark_tile_ahead<Tile>(c, epilogue, row_of(first), end, ahead);
  if constexpr (P > 1) {
    for (int i = ark_tid(); i < KEPT / P; i += ARK_THREADS) counts[i] = 0u;
  }
  ark_gathered();
  // The address of the elements that a lane needs from two neighbouring blocks of 32 elements of k.
  // In a box they are two chunks of 16 bytes.
  const int chunk = BOXED ? Box::chunk() : ark_lane() % 4, next = BOXED ? Box::NEXT : 4;
  const W* from = input.p + own * K + chunk * 8;
  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  for (int j = first; j < stages; j += ARK_WARPS) {
    float d[BOXED ? Box::SETS : 1][BOXED ? Box::CHAINS : 2][4] = {};
    const W* w = nullptr;
#pragma unroll 1
    for (int begin = 0; begin < ALL; begin += ROUND) {
      uint4 x[ROUND];
#pragma unroll
      for (int i = 0; i < ROUND; ++i) {
        const int at = (begin + i) / 2 * 64 + i % 2 * next * 8;
        x[i] =
            BOXED || own < M ? ark_load_far(from + j % P * PART + at) : make_uint4(0u, 0u, 0u, 0u);
      }
      if (begin == 0) w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + j));
      if constexpr (BOXED) {
        const auto halves = [&](int i, int half) {
          const uint4 &u = x[2 * i], &v = x[2 * i + 1];
          return half == 0 ? make_uint4(u.x, u.z, v.x, v.z) : make_uint4(u.y, u.w, v.y, v.w);
        };
        ark_box_products<R, M, ROUND / 2, ROUND / 2>(w + begin * 32 * R, halves, d);
      } else {
        ark_tile_products<R, PART, ROUND, ROUND>(w + begin * 32, [&](int i) { return x[i]; }, d[0]);
      }
    }
    ark_stage_done(c, t.fetch_begin + j);
    float sum[4];
    if constexpr (BOXED) {
      ark_box_tile<R, M>(d, sum);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] = d[0][0][e] + d[0][1][e];
    }
    if constexpr (P > 1) {
      if (!ark_batch_total<Tile, R * M, P, KEPT>(j, parts, counts, sum)) continue;
    }
    if (j / P != first / P) ark_tile_ahead<Tile>(c, epilogue, row_of(j), end, ahead);
    ark_tile_store<Tile>(c, epilogue, row_of(j), end, sum, scale, ahead);
  }
  return true;
}
