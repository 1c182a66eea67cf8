// A linear layer of one input row whose weights are rows of a quantised matrix, in the variant
// `roles`. It works like linear_roles.h, but converts the codes in a stage of the ring to operands
// of matrix units.

// The dot products of R rows of weights with x by ordinary instructions, for rows that matrix units
// do not support. Lane l gets the product of row l R / 32.
template <int R, class ROW, typename T>
ARK_DEVICE float ark_lane_products(const ROW* rows, const T* x) {
  float sum[R];
#pragma unroll
  for (int r = 0; r < R; ++r) {
    float own[1];
    ark_row_products<1, ROW::COLUMNS>(rows[r], x, own);
    sum[r] = own[0];
  }
  return ark_warp_sums<R>(sum);
}

// The number of pairs of elements of the input row that a thread loads: two pairs for each block of
// elements that its warp loads.
template <int K>
constexpr int ARK_BLOCK_PAIRS =
    2 * ((K + ARK_INPUT_BLOCK * ARK_WARPS - 1) / (ARK_INPUT_BLOCK * ARK_WARPS));
ARK_DEVICE int ark_own_pair() { return ark_unknown(ark_warp() * ARK_INPUT_BLOCK + ark_lane() * 2); }
ARK_DEVICE int ark_block_place(int own, int i) {
  return own + i / 2 * (ARK_WARPS * ARK_INPUT_BLOCK) + i % 2 * 64;
}
// Loads the norm's weights for this thread's pairs of elements.
template <int K, typename T>
ARK_DEVICE void ark_block_factors(const T* norm, float (&factor)[2 * ARK_BLOCK_PAIRS<K>]) {
  const int own = ark_own_pair();
#pragma unroll
  for (int i = 0; i < ARK_BLOCK_PAIRS<K>; ++i) {
    const int at = ark_block_place(own, i);
    factor[2 * i] = at < K ? ark_get(norm, at) : 0.0f;
    factor[2 * i + 1] = at < K ? ark_get(norm, at + 1) : 0.0f;
  }
}

// Loads an input row of K elements to xs in shared memory, multiplied by `factor` if NORM. The row
// is the sum of S rows (shares of ranks), which are added in cyclic order from share FIRST on.
// Returns the sum of the squares of this thread's elements.
template <class Tile, int K, int S, int FIRST, bool NORM, typename P, typename T, int F>
ARK_DEVICE float ark_tile_row(ArkCtx& c, const P* p, const float (&factor)[F], T* xs, float* blocks,
                              bool system) {
  constexpr int ALL = ARK_BLOCK_PAIRS<K>, MOST = S < 6 ? 12 / S / 2 * 2 : 2;
  constexpr int N = ALL < MOST ? ALL : MOST;
  const int own = ark_own_pair();
  float square = 0.0f;
#pragma unroll
  for (int from = 0; from < ALL; from += N) {
    float v[2 * N * S];
    const auto place = [&](int i) { return ark_block_place(own, from + i); };
    const auto there = [&](int i) { return place(i / S) < K; };
    const auto at = [&](int i) { return p + i % S * K + place(i / S); };
    ark_load_pairs<N * S>(c, p, there, at, v, system);
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      float block[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int pair = i + e / 2;
        float sum = v[2 * (pair * S + FIRST) + e % 2];
#pragma unroll
        for (int s = 1; s < S; ++s) sum += v[2 * (pair * S + (FIRST + s) % S) + e % 2];
        if (place(pair) >= K) sum = 0.0f;
        if constexpr (NORM) {
          square = fmaf(sum, sum, square);
          sum *= factor[2 * (from + pair) + e % 2];
        }
        block[e] = sum;
      }
      if (place(i) - ark_lane() * 2 < K) {
        ark_store_block<Tile, K>(xs, blocks, place(i), place(i + 1), block);
      }
    }
  }
  return square;
}
template <typename T>
struct ArkShort;
template <int N, typename T, typename There, typename At>
ARK_DEVICE void ark_load_fours(ArkCtx& c, const ArkShort<T>*, const There& there, const At& at,
                               uint4 (&seen)[N]);
// Like ark_tile_row, for packets of 4 bytes whose values are not scaled (short_rows.h).
template <class Tile, int K, int S, int FIRST, bool NORM, typename P, typename T, int F>
ARK_DEVICE float ark_tile_row(ArkCtx& c, const ArkShort<P>* p, const float (&)[F], T* xs,
                              float* blocks, bool) {
  static_assert(S == 1 && !NORM && K % 4 == 0, "one row as it is");
  constexpr int ALL = (K / 4 + ARK_THREADS - 1) / ARK_THREADS, N = ALL < 8 ? ALL : 8;
  const int own = ark_unknown(4 * ark_tid());
#pragma unroll
  for (int first = 0; first < ALL; first += N) {
    uint4 v[N] = {};
    const auto place = [&](int i) { return own + 4 * (first + i) * ARK_THREADS; };
    const auto there = [&](int i) { return place(i) < K; };
    const auto at = [&](int i) { return p + place(i); };
    ark_load_fours<N>(c, p, there, at, v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (place(i) - ark_lane() * 4 >= K) continue;
      const P* type = nullptr;
      const float2 low = ark_pair(type, (v[i].x & 0xffffu) | v[i].y << 16);
      const float2 high = ark_pair(type, (v[i].z & 0xffffu) | v[i].w << 16);
      float block[4] = {low.x, low.y, high.x, high.y};
      if (place(i) >= K) block[0] = block[1] = block[2] = block[3] = 0.0f;
      ark_store_block<Tile, K>(xs, blocks, place(i), place(i) + 2, block);
    }
  }
  return 0.0f;
}

// The type of the input in shared memory: fp16 if matrix units multiply (NONE is false), otherwise
// T.
template <bool NONE, typename T>
struct ArkRowInput {
  typedef ark_f16 type;
};
template <typename T>
struct ArkRowInput<true, T> {
  typedef T type;
};

// Computes a linear layer of one input row for some rows of quantised weights: row t.coord[0] to
// row t.coord[1] - 1. A stage (slot of the ring in shared memory) has R rows. XS: bytes of shared
// memory for the input, in type T. The input is the sum of SHARES rows (one per rank), which are
// added in cyclic order from row FIRST on. Returns false if a wait has failed or the launch was
// aborted; the processor must then leave the loop.
template <class ROW, typename T, int R, int XS, int SHARES, int FIRST, class X, class N, class S>
ARK_DEVICE bool ark_linear_row_stages(ArkCtx& c, const ArkTask& t, X input, const N& prologue,
                                      S epilogue) {
  typedef ArkRowTile<ROW, R, T> Tile;
  constexpr int K = ROW::COLUMNS, STEP = 32 / R, WIDTH = S::WIDTH;
  static_assert(Tile::SIZE * sizeof(T) + 4 * ((K + ARK_INPUT_BLOCK - 1) / ARK_INPUT_BLOCK) <= XS,
                "the input and its blocks' factors have their place");
  typedef typename ArkRowInput<Tile::NONE, T>::type Input;
  Input* xs = reinterpret_cast<Input*>(ARK_SCRATCH(c));
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c) + XS);
  float* blocks = squares - (K + ARK_INPUT_BLOCK - 1) / ARK_INPUT_BLOCK;
  const int end = t.coord[1];
  const int first = static_cast<int>((static_cast<ark_u32>(ark_warp()) + ARK_WARPS -
                                      (ark_stages_before(c) + t.fetch_begin) % ARK_WARPS) %
                                     ARK_WARPS);
  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  // Two rows of one stage each take the matrix unit no longer than one row. So the last two stages
  // of a warp are multiplied at once, if a warp has two slots of the ring.
  constexpr bool PAIRS = R == 1 && !Tile::NONE && WIDTH == 1 && ARK_RING_DEPTH >= 2 * ARK_WARPS;
  const auto paired = [&](int j) {
    return PAIRS && j + ARK_WARPS < stages && j + 2 * ARK_WARPS >= stages;
  };
  const auto row_of = [&](int j) {
    return t.coord[0] + j * R + (paired(j) ? ark_lane() / 16 * ARK_WARPS : ark_lane() / STEP);
  };
  float ahead[1][WIDTH] = {};
  const auto leads = [&](int j) { return ark_lane() % (paired(j) ? 16 : STEP) == 0; };
  const auto prepare = [&](int j) {
    const int row = row_of(j);
    if (leads(j) && row < end) ark_sums_ahead(c, epilogue, 0, row, 1, ahead);
  };
  if constexpr (!S::WAITS) prepare(first);
  float factor[N::norm ? 2 * ARK_BLOCK_PAIRS<K> : 1];
  if constexpr (N::norm) ark_block_factors<K>(prologue.weight.p, factor);
  if (!ark_enter(c)) return false;
  if constexpr (S::WAITS) prepare(first);
  float square =
      ark_tile_row<Tile, K, SHARES, FIRST, N::norm>(c, input.p, factor, xs, blocks, X::system);
  const ark_u32 gathered = ark_gather_stored();
  ark_u32 squared = 0u;
  if constexpr (N::norm) {
    square = ark_warp_sum(square);
    if (ark_lane() == 0) squares[ark_warp()] = square;
    squared = ark_squares_stored();
  }
  const ROW* w = nullptr;
  if (first < stages) w = reinterpret_cast<const ROW*>(ark_stage(c, t.fetch_begin + first));
  ark_gather_wait(gathered);
  float scale = 1.0f;
  for (int j = first; j < stages; j += paired(j) ? 2 * ARK_WARPS : ARK_WARPS) {
    const int row = row_of(j);
    if (j != first) {
      prepare(j);
      w = reinterpret_cast<const ROW*>(ark_stage(c, t.fetch_begin + j));
    }
    const bool lead = leads(j), pair = paired(j);
    float total;
    if constexpr (Tile::NONE) {
      total = ark_lane_products<R>(w, xs);
    } else if constexpr (PAIRS) {
      if (pair) {
        const char* second = ark_stage(c, t.fetch_begin + j + ARK_WARPS);
        const auto apart = second - reinterpret_cast<const char*>(w);
        total = ark_tile_products<2, Tile>(w, xs, blocks, static_cast<int>(apart));
        ark_stage_done(c, t.fetch_begin + j + ARK_WARPS);
      } else {
        total = ark_tile_products<R, Tile>(w, xs, blocks);
      }
    } else {
      total = ark_tile_products<R, Tile>(w, xs, blocks);
    }
    ark_stage_done(c, t.fetch_begin + j);
    if constexpr (N::norm) {
      if (j == first) {  // only after the stage was released: the loading warp needs its slot
        ark_squares_wait(squared);
        float all = 0.0f;
#pragma unroll
        for (int i = 0; i < ARK_WARPS; ++i) all += squares[i];
        scale = ark_rsqrt(all / K + prologue.eps);
      }
    }
    total *= scale;
    if constexpr (WIDTH == 1) {
      const float sums[1] = {total};
      if (lead && row < end) ark_sums_store(c, epilogue, 0, row, 1, sums, ahead[0]);
    } else {
      const float sums[2] = {total, ark_shfl_xor(total, STEP)};
      if (lead && (ark_lane() / STEP & 1) == 0 && row < end) {
        ark_sums_store(c, epilogue, 0, row, 2, sums, ahead[0]);
      }
    }
  }
  ark_sums_finish(c, t, epilogue, squares + ARK_WARPS);
  return true;
}
