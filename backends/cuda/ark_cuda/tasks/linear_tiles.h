// Linear layers of several input rows (linear_batch.h): how the matrix of sums is divided among the
// lanes of a warp, and the epilogue that is applied to the sums.

// A lane's part of the products of R rows of weights with M rows of the input. A lane has two
// neighbouring rows of weights, from row() on, and COLUMNS input rows, from column() on. Element e
// belongs to row e / COLUMNS and column e % COLUMNS of this part. TALL: true if rows of weights are
// the 16 rows of the matrix units' tile, false if they are its 8 columns.
template <bool TALL, int R, int M>
struct ArkRowsTile {
  static constexpr int COLUMNS = TALL ? 2 : 1, ALL = 2 * COLUMNS;
  // The bits of a lane's number with values from FIRST_ROW to below LAST_ROW select the lane's
  // rows. Lanes whose numbers differ only in these bits have the same columns.
  static constexpr int FIRST_ROW = TALL ? 4 : 1, LAST_ROW = TALL ? 32 : 4;
  ARK_DEVICE int row() { return (TALL ? ark_lane() / 4 : ark_lane() % 4) * 2; }
  ARK_DEVICE int column() { return TALL ? ark_lane() % 4 * 2 : ark_lane() / 4; }
  // The index of a lane's element e in the matrix of R rows by M columns, or -1 if it is outside of
  // the matrix.
  ARK_DEVICE int at(int e) {
    const int own = row() + e / COLUMNS, other = column() + e % COLUMNS;
    return own < R && other < M ? own * M + other : -1;
  }
};

// ark_tile_ahead loads the operands of the epilogue before the sums of a tile are complete.
// ark_tile_store applies the epilogue to the sums and stores the results. A lane has two
// neighbouring rows of the weights (rows of the tile) and several rows of the input (columns of the
// tile). row: the lane's first row of the weights. end: the end of the task's rows of weights.
template <class Tile, class S>
ARK_DEVICE void ark_tile_ahead(ArkCtx& c, const S& epilogue, int row, int end,
                               float (&ahead)[Tile::COLUMNS][1][2]) {
#pragma unroll
  for (int e = 0; e < Tile::COLUMNS; ++e) {
    if (Tile::at(e) < 0 || row >= end) continue;
    ark_sums_ahead(c, epilogue, Tile::column() + e, row, end - row, ahead[e]);
  }
}
// The epilogue of a layer whose sums are logits of M sequences, each with its own sampling settings
// and position. For each sequence, a task finds the best token among its own rows of weights.
// TILES: the number of these tasks. STAGES: the number of their stages, of R rows each.
template <int M, int SETTINGS, int R, int TILES, int STAGES, class O, class S, class P, class C>
struct ArkSampleRows {
  static constexpr bool WAITS = false;
  O output;
  S settings;
  P position;
  C candidates;
  decltype(ark_sampler(S{}, P{}, 0)) sampler[2];  // of this lane's columns
};
template <int M, int SETTINGS, int R, int TILES, int STAGES, class O, class S, class P, class C>
ARK_DEVICE ArkSampleRows<M, SETTINGS, R, TILES, STAGES, O, S, P, C> ark_sample_rows(O output,
                                                                                    S settings,
                                                                                    P position,
                                                                                    C candidates) {
  return {output, settings, position, candidates, {}};
}

template <class S>
ARK_DEVICE void ark_tile_sums(ArkCtx& c, S& epilogue, int, int column, int row, int rows,
                              const float (&both)[2], const float (&ahead)[2]) {
  ark_sums_store(c, epilogue, column, row, rows, both, ahead);
}
template <int M, int SETTINGS, int R, int TILES, int STAGES, class O, class S, class P, class C>
ARK_DEVICE void ark_tile_sums(ArkCtx& c,
                              ArkSampleRows<M, SETTINGS, R, TILES, STAGES, O, S, P, C>& s, int e,
                              int column, int row, int rows, const float (&both)[2],
                              const float (&)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= rows) continue;
    ark_publish(c, s.output, 0, 0, column, row + r, both[r]);
    ark_sample(s.sampler[e], both[r], row + r);
  }
}
template <class Tile, class S>
ARK_DEVICE void ark_tile_store(ArkCtx& c, S& epilogue, int row, int end,
                               const float (&sum)[Tile::ALL], const float (&scale)[2],
                               const float (&ahead)[Tile::COLUMNS][1][2]) {
#pragma unroll
  for (int e = 0; e < Tile::COLUMNS; ++e) {
    if (Tile::at(e) < 0 || row >= end) continue;
    const float both[2] = {sum[e] * scale[e], sum[Tile::COLUMNS + e] * scale[e]};
    ark_tile_sums(c, epilogue, e, Tile::column() + e, row, end - row, both, ahead[e][0]);
  }
}

// Hooks for epilogues that keep values over a whole task, such as the best logit. By default they
// do nothing. ark_tile_begin is called before a task begins, ark_tile_finish after all of its sums
// are stored. red: shared memory, 2 * ARK_WARPS words for each input row.
template <class Tile, class E>
ARK_DEVICE void ark_tile_begin(E&) {}
template <class Tile, class E>
ARK_DEVICE void ark_tile_finish(const ArkTask&, E&, float*) {}

template <class Tile, int M, int SETTINGS, int R, int TILES, int STAGES, class O, class S, class P,
          class C>
ARK_DEVICE void ark_tile_begin(ArkSampleRows<M, SETTINGS, R, TILES, STAGES, O, S, P, C>& s) {
#pragma unroll
  for (int e = 0; e < Tile::COLUMNS; ++e) {
    const int own = Tile::column() + e < M ? Tile::column() + e : 0;
    S settings = s.settings;
    P position = s.position;
    settings.p += SETTINGS * own, position.p += own;
    s.sampler[e] = ark_sampler(settings, position, -1);
  }
}
template <class Tile, int M, int SETTINGS, int R, int TILES, int STAGES, class O, class S, class P,
          class C>
ARK_DEVICE void ark_tile_finish(const ArkTask& t,
                                ArkSampleRows<M, SETTINGS, R, TILES, STAGES, O, S, P, C>& s,
                                float* red) {
  ark_u32* ids = reinterpret_cast<ark_u32*>(red + ARK_WARPS * M);
#pragma unroll
  for (int e = 0; e < Tile::COLUMNS; ++e) {
    auto& own = s.sampler[e];
#pragma unroll
    for (int mask = Tile::FIRST_ROW; mask < Tile::LAST_ROW; mask *= 2) {
      const float score = ark_shfl_xor(own.best, mask);
      const ark_u32 token = ark_shfl_xor(own.token, mask);
      if (score > own.best || (score == own.best && token < own.token)) {
        own.best = score;
        own.token = token;
      }
    }
    const int place = ark_warp() * M + Tile::column() + e;
    if (Tile::row() != 0 || Tile::at(e) < 0) continue;
    red[place] = own.best;
    ids[place] = own.token;
  }
  ark_sync();
  const int m = ark_tid();
  if (m >= M) return;
  float best = red[m];
  ark_u32 token = ids[m];
  for (int w = 1; w < ARK_WARPS; ++w) {
    const float score = red[w * M + m];
    const ark_u32 id = ids[w * M + m];
    if (score > best || (score == best && id < token)) best = score, token = id;
  }
  const ark_i64 tile = (static_cast<ark_i64>(t.coord[0] / R) * TILES + STAGES - 1) / STAGES;
  s.candidates.p[2 * (m * TILES + tile)] = best;
  s.candidates.p[2 * (m * TILES + tile) + 1] = ark_bits_float(token);
}
