// Attention of one row over keys and values in pages. ark/tasks/paged.py describes the task and its
// accesses. The steps are those of ark_attention_warps (attention.h), which reads contiguous rows.

// Computes attention of one query row over one split of a sequence's positions, whose keys and
// values are in pages of a pool. Task coordinates: row, key/value head, split. MOST: the most pages
// that a sequence can have. A group of lanes reads a row of the pool, 16 bytes per lane. A lane
// loads U rows at a time. Returns false if a wait has failed or the launch was aborted; the
// processor must then leave the loop.
template <int G, int KV_HEADS, int D, int PAGE, int POOL, int MOST, int SPLITS, int W, class Q,
          class K, class V, class T, class P, class O, class F>
ARK_DEVICE bool ark_attention_pages(ArkCtx& c, const ArkTask& t, float scale, Q query, K keys,
                                    V values, T pages, P position, O output, F fresh) {
  constexpr int ROOM = PAGE * MOST, E = 16 / sizeof(*keys.p), LANES = D / E, ROWS = 32 / LANES;
  constexpr bool FOUR =
      ARK_WARPS <= 8 && G <= 4 && LANES >= 4 && ROOM / SPLITS >= 512;  // registers
  constexpr int STEP = ROWS * W, MOST_ROWS = FOUR ? 4 : 2;
  constexpr int U = LANES < 2 || ROOM / SPLITS <= STEP ? 1 : MOST_ROWS, OWN = LANES / U;
  constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;
  auto& s = *reinterpret_cast<ArkAttentionParts<G, D, W>*>(ARK_SCRATCH(c));
  const int row = t.coord[0], head = t.coord[1], split = t.coord[2];
  const int at = position.p[0], seen = (at < ROOM ? at : ROOM) + row + 1;
  const int count = seen < 0 ? 0 : seen < ROOM ? seen : ROOM;
  const int begin = static_cast<int>(static_cast<ark_i64>(count) * split / SPLITS);
  const int end = static_cast<int>(static_cast<ark_i64>(count) * (split + 1) / SPLITS);
  // The position whose key and value are in the operand `fresh`, if it belongs to this task's
  // split. Otherwise a number larger than all positions.
  const int newest = F::given && end == count ? count - 1 : 0x7fffffff;
  const int column = ark_lane() % LANES * E, mine = ark_warp() * ROWS + ark_lane() / LANES;
  const auto* some_keys = keys.p;
  const auto* some_values = values.p;
  uint4 k[U] = {}, v[U] = {};
  int number[U] = {};
  // Loads the number of the page that contains row u of the batch of rows that begins at `first`.
  const auto find = [&](int u, int first) {
    const int e = first + u * STEP + mine;
    if (ark_warp() < W && e < end && e < newest) number[u] = pages.p[e / PAGE];
  };
  // Loads 16 bytes of the key and of the value of row u of the batch.
  const auto load = [&](int u, int first) {
    const int e = first + u * STEP + mine;
    if (ark_warp() >= W || e >= end || e >= newest) return;
    const int page = number[u] >= 0 && number[u] < POOL ? number[u] : 0;
    const ark_i64 from = ((static_cast<ark_i64>(page) * KV_HEADS + head) * PAGE + e % PAGE) * D;
    k[u] = *reinterpret_cast<const uint4*>(some_keys + from + column);
    v[u] = *reinterpret_cast<const uint4*>(some_values + from + column);
  };
  const auto first_rows = [&] {
#pragma unroll
    for (int u = 0; u < U; ++u) find(u, begin);
#pragma unroll
    for (int u = 0; u < U; ++u) load(u, begin);
#pragma unroll
    for (int u = 0; u < U; ++u) find(u, begin + U * STEP);
  };
  if (!ark_attention_inputs<G, KV_HEADS, D, W>(c, s, row, head, end == count, scale * LOG2E, query,
                                               fresh, first_rows)) {
    return false;
  }
  // A page number outside of the pool ends the run here. Data that was read from the page that
  // replaced it is not used.
  ark_check_pages<ROOM>(c, ark_paged<PAGE, POOL>(keys, pages), position, begin, end);
  ark_sync();
  float top[G], den[G], o[G][E];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    top[g] = -1e30f;
    den[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < E; ++i) o[g][i] = 0.0f;
  }
  for (int first = begin; ark_warp() < W && first < end; first += U * STEP) {
    // The loads of the next rows, and of the page numbers of the rows after those, are issued
    // before any of the present rows is used (as in attention.h).
    uint4 key[U], value[U];
#pragma unroll
    for (int u = 0; u < U; ++u) key[u] = k[u], value[u] = v[u];
#pragma unroll
    for (int u = 0; u < U; ++u) load(u, first + U * STEP);
#pragma unroll
    for (int u = 0; u < U; ++u) find(u, first + 2 * U * STEP);
    float score[G][U] = {};
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * STEP >= end) continue;
      float kf[E];
      ark_unpack(kf, key[u], some_keys);
      if (first + u * STEP + mine == newest) {
#pragma unroll
        for (int i = 0; i < E; ++i) kf[i] = s.current[column + i];
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int i = 0; i < E; ++i) {
          score[g][u] = fmaf(kf[i], s.query[g * D + column + i], score[g][u]);
        }
      }
    }
    const bool there = first + ark_lane() % LANES / OWN * STEP + mine < end;
    float power[G];
    ark_weigh_scores<LANES>(score, there, power, top, den, o);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u * STEP >= end) continue;
      float vf[E];
      ark_unpack(vf, value[u], some_values);
      if (first + u * STEP + mine == newest) {
#pragma unroll
        for (int i = 0; i < E; ++i) vf[i] = s.current[D + column + i];
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const float p = __shfl_sync(0xffffffffu, power[g], ark_lane() / LANES * LANES + u * OWN);
#pragma unroll
        for (int i = 0; i < E; ++i) o[g][i] = fmaf(p, vf[i], o[g][i]);
      }
    }
  }
  // All rows of a warp use the same maximum, so their parts of the sums are added without
  // rescaling.
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int mask = OWN; mask < 32; mask *= 2) den[g] += ark_shfl_xor(den[g], mask);
#pragma unroll
    for (int mask = LANES; mask < 32; mask *= 2) {
#pragma unroll
      for (int i = 0; i < E; ++i) o[g][i] += ark_shfl_xor(o[g][i], mask);
    }
    if (ark_warp() < W && ark_lane() < LANES) {
      float* to = s.part[ark_warp()][g];
#pragma unroll
      for (int i = 0; i < E; ++i) to[column + i] = o[g][i];
      if (ark_lane() == 0) {
        to[D] = top[g] * LN2;
        to[D + 1] = den[g];
      }
    }
  }
  ark_sync();
  ark_attention_store<SPLITS, true>(c, s, output, row, head, split);
  return true;
}
