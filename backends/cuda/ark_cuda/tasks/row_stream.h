// Softmax and norms of rows that bulk copies (cp.async.bulk) bring to shared memory, several rows
// ahead. More bytes are in flight than the registers of row_norm.h can hold. The copies proceed
// while the warps compute.

// Computes OP (softmax or a norm) of a task's rows: rows coord[2] to coord[2] + ROWS - 1 of COUNT
// rows. A row has K elements; each thread has E vectors of V elements of the row. Rows are assigned
// round-robin to teams of TEAM warps. Each team has space for DEPTH rows in shared memory, to which
// rows are copied ahead. In front of this space are FOLDS bytes for sums and BARRIERS bytes for the
// barriers of the copies.
template <class OP, int ROWS, int COUNT, int K, int FOLDS, int BARRIERS, int V, int E, int TEAM,
          int DEPTH, class In, class Out, class Weight>
ARK_DEVICE void ark_row_stream(ArkCtx& c, const ArkTask& t, const In& in, const Out& out,
                               Weight weight, float eps) {
  constexpr int WIDTH = TEAM * ARK_LANES, TEAMS = ARK_WARPS / TEAM;
  constexpr bool WHOLE = K == WIDTH * E * V;
  constexpr int BYTES = static_cast<int>(sizeof(*in(0))) * K;
  const int rows = ROWS == COUNT || t.coord[2] + ROWS < COUNT ? ROWS : COUNT - t.coord[2];
  const int team = TEAMS == 1 ? 0 : ark_warp() / TEAM;
  const int me = (ark_tid() - team * WIDTH) * V;
  char* red = ARK_SCRATCH(c);
  float* sums = reinterpret_cast<float*>(red);
  ark_u64* full = reinterpret_cast<ark_u64*>(red + FOLDS) + team * DEPTH;
  char* stages = red + FOLDS + BARRIERS + team * DEPTH * BYTES;
  const bool leads = me == 0;
  const auto fetch = [&](int r, int slot) {
    if (!leads || r >= rows) return;
    ark_bulk_in(stages + slot * BYTES, reinterpret_cast<ark_u64>(in(r)), BYTES, full + slot);
  };
  if (leads) ark_bulk_begin<DEPTH>(full);
  for (int i = 0; i < DEPTH; ++i) fetch(team + i * TEAMS, i);
  float by[E * V];
#pragma unroll
  for (int e = 0; e < E; ++e) {
    const int k = e * WIDTH * V + me;
    float some[V] = {};
    if (WHOLE || k < K) ark_weights(some, weight, k);
#pragma unroll
    for (int j = 0; j < V; ++j) by[e * V + j] = some[j];
  }
  ark_team_sync<TEAM>();  // the barriers are initialised
  int slot = 0, parity = 0;
  ark_u32 lap = 0u;
  for (int r = team; r < rows; r += TEAMS) {
    ark_bulk_await(full + slot, lap);
    const auto* row = reinterpret_cast<decltype(in(0))>(stages + slot * BYTES);
    float v[E * V], centre[1] = {OP::First::none(0.0f)}, total[1] = {0.0f};
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int k = e * WIDTH * V + me;
      decltype(ark_held<V>(row)) held{};
      if (WHOLE || k < K) ark_hold(held, row + k);
      const auto pack = ark_unpacked(held);
#pragma unroll
      for (int j = 0; j < V; ++j) v[e * V + j] = ark_get(pack.v, j);
    }
    const auto inside = [&](int i) { return WHOLE || i / V * WIDTH * V + me < K; };
    // The reduction of a row contains a barrier. After it, all threads of the team have read the
    // row, so the next row may be copied to its space.
    const int next = r + DEPTH * TEAMS;
    if (OP::FIRST) {
#pragma unroll
      for (int i = 0; i < E * V; ++i) {
        if (inside(i)) centre[0] = OP::First::join(centre[0], v[i]);
      }
      ark_fold<typename OP::First, TEAM>(centre, sums, parity);
      fetch(next, slot);
    }
    centre[0] = OP::centre(centre[0], K);
#pragma unroll
    for (int i = 0; i < E * V; ++i) {
      if (inside(i)) total[0] += OP::term(v[i], centre[0]);
    }
    ark_fold<ArkAddFold, TEAM>(total, sums, parity);
    if (!OP::FIRST) fetch(next, slot);
    const float factor = OP::factor(total[0], K, eps);
    auto* to = out(r);
#pragma unroll
    for (int e = 0; e < E; ++e) {
      const int k = e * WIDTH * V + me;
      if (!WHOLE && k >= K) continue;
      decltype(ark_load_pack<V>(to)) pack;
      float plus[V] = {};
      ark_biases(plus, weight, k);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const int i = e * V + j;
        ark_put(pack.v, j, ark_biased(OP::value(v[i], factor) * by[i], weight, plus[j]));
      }
      ark_store_pack<V>(to + k, pack);
    }
    if (++slot == DEPTH) slot = 0, lap ^= 1u;
  }
  ark_team_sync<TEAM>();  // all threads have waited for the last copies
  if (leads) ark_bulk_end<DEPTH>(full);
}
