// A linear layer of one input row in the variant `roles`. The computing warps load the input to
// shared memory, each warp a part of it; matrix units need it in the weights' type. Each warp then
// processes its own stages of the ring: it multiplies a stage's rows of weights by the input,
// publishes the results and goes on to its next stage.

// The number of pairs of elements of the input row that a thread loads.
template <int K>
constexpr int ARK_ROW_PAIRS = (K / 2 + ARK_THREADS - 1) / ARK_THREADS;

// Loads the norm's weights for this thread's pairs of elements.
template <int K, typename T>
ARK_DEVICE void ark_row_factors(const T* norm, float (&factor)[2 * ARK_ROW_PAIRS<K>]) {
#pragma unroll
  for (int i = 0; i < ARK_ROW_PAIRS<K>; ++i) {
    const int at = 2 * (i * ARK_THREADS + ark_tid());
    factor[2 * i] = at < K ? ark_get(norm, at) : 0.0f;
    factor[2 * i + 1] = at < K ? ark_get(norm, at + 1) : 0.0f;
  }
}

// Loads an input row of K elements to xs in shared memory, multiplied by `factor` if NORM. The row
// is the sum of S rows (shares of ranks), which are added in cyclic order from share FIRST on.
// Returns the sum of the squares of this thread's elements.
template <int K, int S, int FIRST, bool NORM, typename P, typename T, int F>
ARK_DEVICE float ark_row(ArkCtx& c, const P* p, const float (&factor)[F], T* xs, bool system) {
  constexpr int ALL = ARK_ROW_PAIRS<K>, MOST = S < 12 ? 12 / S : 1, N = ALL < MOST ? ALL : MOST;
  float square = 0.0f;
#pragma unroll
  for (int first = 0; first < ALL; first += N) {
    float v[2 * N * S];
    const auto place = [&](int i) { return 2 * ((first + i) * ARK_THREADS + ark_tid()); };
    const auto there = [&](int i) { return place(i / S) < K; };
    const auto at = [&](int i) { return p + i % S * K + place(i / S); };
    ark_load_pairs<N * S>(c, p, there, at, v, system);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (place(i) >= K) continue;
      float a = v[2 * (i * S + FIRST)], b = v[2 * (i * S + FIRST) + 1];
#pragma unroll
      for (int s = 1; s < S; ++s) {
        const int share = i * S + (FIRST + s) % S;
        a += v[2 * share], b += v[2 * share + 1];
      }
      if constexpr (NORM) {
        square = fmaf(a, a, fmaf(b, b, square));
        a *= factor[2 * (first + i)], b *= factor[2 * (first + i) + 1];
      }
      ark_narrow(xs + place(i), a, b);
    }
  }
  return square;
}

// Adds this lane's part of the dot products of x with R rows of K weights. x and the rows are in
// shared memory; rows are `pitch` elements apart. If R is small, each dot product has several
// running sums, to hide latency.
template <int R, int K, typename T>
ARK_DEVICE void ark_stage_dots(const T* w, const T* x, float (&sum)[R]) {
  constexpr int E = 16 / sizeof(T), A = R == 1 ? 4 : R == 2 ? 2 : 1;
  float part[R][A] = {};
#pragma unroll 8
  for (int i = ark_lane() * E; i < K; i += 32 * E) {
    float xs[E];
    ark_unpack(xs, *reinterpret_cast<const uint4*>(x + i), x);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float ws[E];
      ark_unpack(ws, *reinterpret_cast<const uint4*>(w + r * K + i), w);
#pragma unroll
      for (int e = 0; e < E; ++e) part[r][e % A] = fmaf(ws[e], xs[e], part[r][e % A]);
    }
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    sum[r] = part[r][0];
#pragma unroll
    for (int a = 1; a < A; ++a) sum[r] += part[r][a];
  }
}

// Adds up the partial sums of a row of weights that is divided along k among several warps. Returns
// true in the warp that adds the last part. That warp gets the row's total, added in the order of
// the parts.
template <int P>
ARK_DEVICE bool ark_row_total(float sum, int row, int number, float* parts, ark_u32* counts,
                              float& total) {
  ark_u32 before = 0u;
  if (ark_lane() == 0) {
    *const_cast<volatile float*>(&parts[row * P + number]) = sum;
    __threadfence_block();
    before = atomicAdd(&counts[row], 1u);
    __threadfence_block();
  }
  before = __shfl_sync(0xffffffffu, before, 0);
  __syncwarp();  // makes the data that lane 0 acquired visible to all lanes; a shuffle does not
  if (before != P - 1) return false;
  total = 0.0f;
#pragma unroll
  for (int i = 0; i < P; ++i) total += *const_cast<volatile float*>(&parts[row * P + i]);
  return true;
}

// Called by the lead warp: polls one packet of the input in row ROW, so that the task does not
// begin long before its input has arrived. In a task that begins early, all threads poll for the
// input, which takes bandwidth from the weights. The polled packet is one that is expected to
// arrive late: the last packet of a processor far from this one. If the input is a sum of shares of
// ranks and has few elements, one packet of each share is polled at once. If it has more elements,
// a packet of this rank's share is polled first, then one of the preceding rank's share.
constexpr int ARK_POLLED_TOGETHER = 4096;
template <int K, int SHARES, int ROW, int PROCESSORS, class X>
ARK_DEVICE void ark_linear_poll(ArkCtx& c, const ArkTask&, X input) {
  const int far = (static_cast<int>(c.processor) + PROCESSORS / 2) % PROCESSORS;
  const auto* last =
      input.p + ROW * K + (static_cast<ark_i64>(far + 1) * K + PROCESSORS - 1) / PROCESSORS - 1;
  constexpr bool TOGETHER = SHARES * K <= ARK_POLLED_TOGETHER;
  ark_poll_packet<TOGETHER ? SHARES : 1>(c, last, X::system, K);
  if (SHARES > 1 && !TOGETHER) ark_poll_packet(c, last + (SHARES - 1) * K, X::system);
}

// Computes a linear layer of one input row for some rows of the weights: row t.coord[0] to row
// t.coord[1] - 1, at most TASK_ROWS rows. Weights have type W. A stage (slot of the ring in shared
// memory) has R rows of K elements. If P > 1, a row is divided among P stages. XS: bytes of shared
// memory for the input. The input is the sum of SHARES rows (one per rank), which are added in
// cyclic order from row FIRST on. Returns false if a wait has failed or the launch was aborted; the
// processor must then leave the loop.
template <typename W, int K, int R, int P, int TASK_ROWS, int XS, int SHARES, int FIRST, class X,
          class N, class S>
ARK_DEVICE bool ark_linear_roles(ArkCtx& c, const ArkTask& t, X input, const N& prologue,
                                 S epilogue) {
  constexpr int STEP = 32 / R, WIDTH = S::WIDTH;
  W* xs = reinterpret_cast<W*>(ARK_SCRATCH(c));
  float* squares = reinterpret_cast<float*>(ARK_SCRATCH(c) + XS);
  float* parts = squares + ARK_WARPS;  // if P > 1: for each row, the sums of its parts
  ark_u32* counts = reinterpret_cast<ark_u32*>(parts + TASK_ROWS * P);
  const int end = t.coord[1];
  const bool lead = ark_lane() % STEP == 0;
  const int first = static_cast<int>((static_cast<ark_u32>(ark_warp()) + ARK_WARPS -
                                      (ark_stages_before(c) + t.fetch_begin) % ARK_WARPS) %
                                     ARK_WARPS);
  const auto row_of = [&](int j) { return t.coord[0] + j / P * R + ark_lane() / STEP; };
  float ahead[1][WIDTH] = {};
  const auto prepare = [&](int row) {
    if (lead && row < end) ark_sums_ahead(c, epilogue, 0, row, 1, ahead);
  };
  if constexpr (!S::WAITS) prepare(row_of(first));
  float factor[N::norm ? 2 * ARK_ROW_PAIRS<K> : 1];
  if constexpr (N::norm) ark_row_factors<K>(prologue.weight.p, factor);
  if (!ark_enter(c)) return false;
  if constexpr (S::WAITS) prepare(row_of(first));
  if constexpr (P > 1) {
    for (int i = ark_tid(); i < TASK_ROWS; i += ARK_THREADS) counts[i] = 0u;
  }
  float square = ark_row<K, SHARES, FIRST, N::norm>(c, input.p, factor, xs, X::system);
  const ark_u32 gathered = ark_gather_stored();
  ark_u32 squared = 0u;
  if constexpr (N::norm) {
    square = ark_warp_sum(square);
    if (ark_lane() == 0) squares[ark_warp()] = square;
    squared = ark_squares_stored();
  }
  const int stages = static_cast<int>(t.fetch_end - t.fetch_begin);
  const W* w = nullptr;
  if (first < stages) w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + first));
  ark_gather_wait(gathered);
  float scale = 1.0f;
  for (int j = first; j < stages; j += ARK_WARPS) {
    const int row = row_of(j);
    if (j != first) {
      prepare(row);
      w = reinterpret_cast<const W*>(ark_stage(c, t.fetch_begin + j));
    }
    float sum[R];
    if constexpr (ARK_BY_UNITS<R, K / P, W>) {
      ark_stage_products<R, K / P>(w, xs + j % P * (K / P), sum);
    } else {
      ark_stage_dots<R, K / P>(w, xs + j % P * (K / P), sum);
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
    float total = ark_warp_sums<R>(sum);
    if constexpr (P > 1) {
      if (!ark_row_total<P>(total, j / P, j % P, parts, counts, total)) continue;
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
  ark_sums_finish(c, t, epilogue, parts + (P > 1 ? (P + 1) * TASK_ROWS : 0));
  return true;
}
